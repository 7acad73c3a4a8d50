"""The queue's promises, without a loop and without a device."""

from hypothesis import given, settings
from hypothesis import strategies as st

from asyncmem.engine.admit import Queue, Waiter


class Memory:
    """So many free bytes, given to whoever fits."""

    def __init__(self, free: int) -> None:
        self.free = free

    def grant(self, waiter: Waiter) -> bool:
        """Give what is asked for if it is there."""
        if waiter.nbytes > self.free:
            return False
        self.free -= waiter.nbytes
        return True

    def room(self) -> int:
        """Answer what is free."""
        return self.free


def queue_of(*waiters: Waiter, bypass: int = 1000) -> Queue[Waiter]:
    """Make a queue in which these stand, in this order."""
    queue: Queue[Waiter] = Queue(bypass)
    for waiter in waiters:
        queue.join(waiter)
    return queue


def serve(queue: Queue[Waiter], free: int) -> list[Waiter]:
    """Serve from so many free bytes."""
    memory = Memory(free)
    return queue.serve(memory.grant, memory.room)


def test_equal_waiters_are_served_in_the_order_of_arrival() -> None:
    """First come, first served."""
    waiters = [Waiter(10) for _ in range(5)]
    assert serve(queue_of(*waiters), 30) == waiters[:3]


def test_urgent_waiter_goes_first() -> None:
    """A larger priority is served before an older waiter of a smaller one."""
    late, urgent = Waiter(10), Waiter(10, priority=1)
    assert serve(queue_of(late, urgent), 10) == [urgent]


def test_small_waiter_overtakes_one_that_does_not_fit() -> None:
    """Memory that the head cannot use does not lie idle."""
    large, small = Waiter(100), Waiter(10)
    assert serve(queue_of(large, small), 50) == [small]


def test_overtaking_ends_with_the_budget() -> None:
    """Once the bypass budget is spent the queue is strict, even for what would fit."""
    large = Waiter(100)
    queue = queue_of(large, bypass=25)
    for _ in range(3):
        queue.join(Waiter(10))
    assert len(serve(queue, 50)) == 2
    assert serve(queue, 50) == []
    assert serve(queue, 100)[0] is large


def test_priority_ages_by_the_same_budget() -> None:
    """A patient waiter of low priority is overtaken by no more than the budget either."""
    patient = Waiter(10)
    queue = queue_of(patient, bypass=30)
    served = []
    for _ in range(5):
        queue.join(Waiter(10, priority=9))
        served += serve(queue, 10)
    assert served.index(patient) == 3


def test_waiter_that_left_is_passed_over() -> None:
    """Leaving makes room for those behind, and leaving twice is nothing."""
    first, second = Waiter(10), Waiter(10)
    queue = queue_of(first, second)
    queue.leave(first)
    queue.leave(first)
    assert (len(queue), queue.bytes) == (1, 10)
    assert serve(queue, 10) == [second]
    assert queue.empty


def test_every_size_that_fits_is_found() -> None:
    """A small waiter is found behind any number of larger ones, whatever their sizes."""
    waiters = [Waiter(100 + number) for number in range(50)]
    small = Waiter(5)
    assert serve(queue_of(*waiters, small), 10) == [small]


@settings(max_examples=200)
@given(st.data())
def test_nobody_is_overtaken_by_more_than_the_budget(data: st.DataObject) -> None:
    """Whatever joins, leaves and is freed: bytes granted past a waiter while it stood stay within the bypass budget."""
    bypass = data.draw(st.integers(0, 100))
    queue: Queue[Waiter] = Queue(bypass)
    standing: dict[Waiter, int] = {}
    for _ in range(data.draw(st.integers(1, 60))):
        act = data.draw(st.integers(0, 3))
        if act == 0 or not standing:
            waiter = Waiter(data.draw(st.integers(1, 40)), data.draw(st.integers(0, 2)))
            queue.join(waiter)
            standing[waiter] = 0
        elif act == 1:
            waiter = data.draw(st.sampled_from(sorted(standing, key=lambda one: one.seq)))
            queue.leave(waiter)
            del standing[waiter]
        else:
            for granted in serve(queue, data.draw(st.integers(0, 60))):
                del standing[granted]
                for older in standing:
                    standing[older] += granted.nbytes if older.seq < granted.seq else 0
        assert all(overtaken <= bypass for overtaken in standing.values())
        assert list(queue) == sorted(standing, key=lambda one: one.seq)
        assert queue.bytes == sum(one.nbytes for one in standing)
