"""Large handles that nobody uses become small ones: what lives on a part of one keeps all of it from moving."""

from collections.abc import Iterator

import pytest

from asyncmem.core import Effect, Heap, Scheduler

from .support import MIB

PAGE = 64 << 10


class Pages:
    """A scheduler of pages alone, at whatever time a test says, with a device whose calls take as long as it says."""

    def __init__(self, **settings: object) -> None:
        self.heap = Heap()
        for arena in (0, 1):
            self.heap.add_space((arena + 1) << 42, 64 * MIB, arena, PAGE)
        self.scheduler = Scheduler(self.heap, 0.0, paged=True, page=PAGE, **settings)  # type: ignore[arg-type]

    def effects(self, now: float) -> Iterator[Effect]:
        """Give the effects that change memory; fences are seen done at once."""
        while effects := self.scheduler.effects():
            for effect in effects:
                if effect.kind == "look":
                    for stream in effect.streams:
                        epoch = self.heap.close_epoch(stream)
                        self.heap.publish(stream, epoch)
                        self.heap.mark_done(stream, epoch)
                    self.scheduler.looked(1, now)
                elif effect.kind == "remap":
                    yield effect

    def carry_out(self, effect: Effect, now: float, seconds: float = 0.0) -> None:
        self.scheduler.remapped(effect.job, len(effect.moves), len(effect.out), len(effect.into), now, seconds=seconds)

    def used(self, nbytes: int, now: float, seconds: float) -> None:
        """Ask for memory that takes the device so long, and free it."""
        request = self.scheduler.submit([nbytes], now)
        for effect in self.effects(now):
            self.carry_out(effect, now, seconds)
        (block,) = self.scheduler.claim(request)
        self.scheduler.freed(self.heap.free(block), now)

    def beat(self, now: float) -> list[Effect]:
        self.scheduler.begin_beat()
        assert not list(self.effects(now))
        self.scheduler.end_beat(now)
        return list(self.effects(now))


def late(pages: Pages) -> None:
    """Bring memory in a large handle, as calls are dear in the pool's first moments; free ones did not serve."""
    pages.used(PAGE, 0.0, 1e-3)
    pages.used(22 * MIB, 1e-3, 1e-3)
    pages.used(24 * MIB, 1e-3, 1e-3)
    assert max(one.nbytes for one in pages.heap.handles()) >= 21 * MIB


def test_large_handles_are_split_once_there_is_time() -> None:
    """In few parts at once, again and again, until none is twice as large as a three-hundredth of what is reserved."""
    pages = Pages()
    late(pages)
    assert pages.beat(2e-3) == []  # calls took most of the time so far
    reserved = pages.heap.reserved()
    for beat in range(100):
        effects = pages.beat(1.0 + beat)
        for effect in effects:
            assert (effect.moves, effect.nbytes, effect.vacated) == ((), 0, 0)
            assert 2 <= len(effect.into) <= 16
            assert sum(nbytes for _, nbytes in effect.into) == sum(nbytes for _, nbytes in effect.out)
            pages.carry_out(effect, 1.0 + beat)
        if not effects:
            break
    assert max(one.nbytes for one in pages.heap.handles()) < max(2 * reserved // 300, 2 * PAGE)
    assert pages.heap.reserved() == reserved
    assert pages.scheduler.gauges()["grows"] == 3
    pages.heap.check()


def test_a_split_takes_no_more_time_than_is_left() -> None:
    """Where the device is slow, the next one waits until the pool has lived longer."""
    pages = Pages()
    late(pages)
    (effect,) = pages.beat(1.0)
    pages.carry_out(effect, 1.0, seconds=0.1)
    assert pages.beat(1.5) == []
    assert pages.beat(5.0)


@pytest.mark.parametrize("settings", [{"take_back": False}, {"limit": 32 * MIB, "limited": True}])
def test_memory_that_need_not_move_stays_as_it_is(settings: dict[str, object]) -> None:
    """Without taking back it never moves, and below a limit it came in small handles."""
    pages = Pages(**settings)
    for nbytes in (PAGE, 22 * MIB, 24 * MIB):
        pages.used(nbytes, 1e-3, 1e-3)
    assert pages.beat(1.0) == []


def test_memory_that_served_stays_as_it_is() -> None:
    """A program for whose requests there was nothing free when more came gains nothing by small handles."""
    pages = Pages()
    pages.used(PAGE, 0.0, 1e-3)
    pages.used(24 * MIB, 1e-3, 1e-3)
    assert max(one.nbytes for one in pages.heap.handles()) >= 21 * MIB
    assert pages.beat(1.0) == []


@pytest.mark.parametrize("terms", [{}, {"calls": True}])
def test_a_request_waits_for_a_split_and_does_not_grow(terms: dict[str, bool]) -> None:
    """What is split serves nobody for a moment, but it is there."""
    pages = Pages()
    late(pages)
    (effect,) = pages.beat(1.0)
    request = pages.scheduler.submit(24 * MIB, 1.0, **terms)
    assert list(pages.effects(1.0)) == []
    assert pages.scheduler.state(request) == "waiting"
    assert pages.beat(1.004) == []  # one at a time
    pages.carry_out(effect, 1.005)
    assert pages.scheduler.state(request) == "granted"


def test_a_thread_that_runs_a_loop_waits_for_no_split() -> None:
    """It gets memory of its own."""
    pages = Pages()
    late(pages)
    (split,) = pages.beat(1.0)
    request = pages.scheduler.submit(24 * MIB, 1.0, calls=True, on_loop=True)
    (growth,) = pages.effects(1.0)
    assert growth.request == request
    pages.carry_out(growth, 1.0)
    assert pages.scheduler.state(request) == "granted"
    pages.carry_out(split, 1.0)
    pages.heap.check()


def test_nothing_is_split_while_a_graph_is_captured_or_after_the_end() -> None:
    """Others' calls could end a capture, and a pool that is closed has its memory on its way back."""
    for stop in (lambda one: one.set_capturing(True), lambda one: one.close(1.0)):
        pages = Pages()
        late(pages)
        stop(pages.scheduler)
        assert pages.beat(1.0) == []


@pytest.mark.parametrize("done", [(0, 0), (1, 0), (1, 3)])
def test_a_split_that_fails_loses_no_more_than_the_device_kept(done: tuple[int, int]) -> None:
    """What went back and did not come again is free addresses."""
    pages = Pages()
    late(pages)
    (effect,) = pages.beat(1.0)
    reserved = pages.heap.reserved()
    unmapped, mapped = done
    pages.scheduler.remapped(effect.job, 0, unmapped, mapped, 1.0, out_of_memory=True)
    gone = sum(nbytes for _, nbytes in effect.out[:unmapped]) - sum(nbytes for _, nbytes in effect.into[:mapped])
    assert pages.heap.reserved() == reserved - gone
    assert pages.beat(2.0) == []  # the device is full
    pages.scheduler.tick(2.0)
    assert pages.beat(3.0)
    pages.heap.check()
