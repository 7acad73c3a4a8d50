"""What `Retire` promises by itself: which driver calls it makes, and what holds when one of them fails."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import pytest

from asyncmem.core import Retire
from asyncmem.devices import Simulated
from asyncmem.errors import DeviceError, InvalidRequest

from .heap import DONE
from .heaps import HEAPS
from .native import DEVICES, NativeSimulated
from .program import FullHeap

KIB = 1024
SIZE = 4 * KIB


@dataclass(frozen=True)
class Make:
    """What a bench is made of: either heap, over fences made by methods or by a table of C functions."""

    heap: type[FullHeap]
    device: type[Simulated]


class Bench:
    """A heap with one segment of stream a, and a second stream b."""

    def __init__(self, make: Make, *, late_fences: bool = True, fence_every: int = 1) -> None:
        self.heap = make.heap()
        self.device = make.device(autojump=False)
        self.retire = Retire(self.heap, self.device, late_fences=late_fences, fence_every=fence_every)
        self.a = self.retire.register(self.device.create_stream("a"))
        self.b = self.retire.register(self.device.create_stream("b"))
        self.segment = self.device.allocate_segment(SIZE, stream=self.retire.streams[self.a])
        self.heap.add_segment(self.segment.address, SIZE, 0, self.a)

    def free(self, block: int, users: Iterable[int] = ()) -> int:
        return self.heap.free(block, self.retire.entries_for(users))

    def calls(self) -> dict[str, int]:
        counts = self.device.log.counts
        return {name: counts[name] for name in ("record", "record_all", "wait", "query") if counts[name]}

    def foreign(self, *, late: bool) -> tuple[int, tuple[tuple[int, int], ...]]:
        found = self.heap.take_foreign(SIZE, self.b, late=late)
        assert found is not None
        return found


@pytest.fixture(params=[f"{heap} heap, {device}" for heap in HEAPS for device in DEVICES])
def make(request: pytest.FixtureRequest) -> Make:
    heap, _, device = request.param.partition(" heap, ")
    return Make(HEAPS[heap], DEVICES[device])


@pytest.fixture
def bench(make: Make) -> Iterator[Bench]:
    bench = Bench(make)
    yield bench
    if isinstance(bench.device, NativeSimulated):
        assert bench.device.problems == []


class TestTaking:
    def test_again_on_the_home_stream_makes_no_driver_call(self, bench: Bench) -> None:
        """Home's own order is enough."""
        for _ in range(3):
            bench.free(bench.heap.take(SIZE, bench.a))
        assert bench.calls() == {}

    def test_behind_a_recorded_fence_costs_one_wait(self, bench: Bench) -> None:
        """The fence travels with the block; the taker is made to wait for it and nothing else is called."""
        bench.free(bench.heap.take(SIZE, bench.a))
        bench.retire.fence(bench.a)
        _, entries = bench.foreign(late=False)
        bench.retire.discharge(bench.b, entries)
        assert bench.calls() == {"record": 1, "wait": 1}
        assert bench.retire.counts().late_fences == 0

    def test_without_a_fence_records_one_late_and_counts_it(self, bench: Bench) -> None:
        """It covers later work too, so it is counted."""
        bench.free(bench.heap.take(SIZE, bench.a))
        _, entries = bench.foreign(late=True)
        bench.retire.discharge(bench.b, entries)
        assert bench.calls() == {"record": 1, "wait": 1}
        assert bench.retire.counts().late_fences == 1

    def test_without_a_fence_is_refused_where_late_fences_are_off(self, make: Make) -> None:
        """The caller puts the block back, and no driver call was made."""
        bench = Bench(make, late_fences=False)
        bench.free(bench.heap.take(SIZE, bench.a))
        _, entries = bench.foreign(late=True)
        with pytest.raises(InvalidRequest, match="late_fences"):
            bench.retire.discharge(bench.b, entries)
        assert bench.calls() == {}

    def test_after_the_host_saw_the_fence_done_makes_no_driver_call(self, bench: Bench) -> None:
        """Then the memory is anybody's."""
        block = bench.heap.take(SIZE, bench.a)
        bench.free(block)
        bench.retire.fence(bench.a)
        assert bench.retire.poll() == 1
        before = bench.calls()
        assert bench.heap.take(SIZE, bench.b)
        assert bench.calls() == before

    @pytest.mark.parametrize("call", ["record", "wait"])
    def test_that_fails_leaves_everything_to_be_tried_again(self, bench: Bench, call: str) -> None:
        """A record that failed publishes nothing; put back, the block can be taken as before."""
        bench.free(bench.heap.take(SIZE, bench.a))
        block, entries = bench.foreign(late=True)
        bench.device.fail(call)
        with pytest.raises(DeviceError, match=call):
            bench.retire.discharge(bench.b, entries)
        assert bench.heap.entry_state(*entries[0]) == (0 if call == "record" else 1)
        bench.heap.put_back(block, entries)
        bench.heap.check()
        again, entries = bench.foreign(late=True)
        bench.retire.discharge(bench.b, entries)
        assert bench.heap.info(again).address == bench.segment.address


class TestFreeing:
    def test_records_a_fence_for_each_user_but_home(self, bench: Bench) -> None:
        """At the free, not at `use_on`; the same user twice is one."""
        block = bench.heap.take(SIZE, bench.a)
        bench.free(block, [bench.b, bench.b])
        assert bench.calls() == {"record": 1}
        assert bench.heap.take(SIZE, bench.a) == 0

    def test_never_fails_with_the_device_and_is_made_up_for_by_polling(self, bench: Bench) -> None:
        """The memory stays out of reach until the fence that could not be recorded has been."""
        block = bench.heap.take(SIZE, bench.a)
        bench.device.fail("record", times=2)
        bench.free(block, [bench.b])
        assert bench.retire.counts().failed_records == 1
        bench.retire.poll()
        assert bench.heap.take(SIZE, bench.a) == 0
        bench.retire.poll()
        assert bench.heap.take(SIZE, bench.a)

    def test_with_a_consumer_that_named_no_stream_waits_for_all(self, bench: Bench) -> None:
        """The context-wide fence covers streams that the pool has never heard of."""
        stranger = bench.device.create_stream()
        stranger.launch(1.0)
        bench.free(bench.heap.take(SIZE, bench.a), [bench.retire.everywhere()])
        bench.retire.poll()
        assert bench.heap.take(SIZE, bench.a) == 0
        bench.device.advance(1.0)
        bench.retire.poll()
        assert bench.heap.take(SIZE, bench.a)
        assert bench.retire.everywhere() == bench.retire.everywhere()


class TestSharing:
    def test_use_on_makes_the_other_stream_wait_now(self, bench: Bench) -> None:
        """Later work of the other stream is behind home's work so far."""
        home, other = (bench.device.stream_of(bench.retire.streams[index]) for index in (bench.a, bench.b))
        home.launch(1.0)
        bench.retire.use_on(bench.a, bench.b)
        assert other.record().at == home.record().at

    def test_use_on_the_home_stream_or_an_unnamed_one_makes_no_driver_call(self, bench: Bench) -> None:
        """The first is in order already, and nobody can make the second wait."""
        bench.retire.use_on(bench.a, bench.a)
        bench.retire.use_on(bench.a, bench.retire.everywhere())
        assert bench.calls() == {}

    def test_hand_over_moves_the_home(self, bench: Bench) -> None:
        """From then on the new home frees and takes without a driver call."""
        block = bench.heap.take(SIZE, bench.a)
        bench.retire.hand_over(block, bench.b)
        assert bench.heap.info(block).stream == bench.b
        before = bench.calls()
        bench.free(block)
        assert bench.heap.take(SIZE, bench.b)
        assert bench.calls() == before

    @pytest.mark.parametrize("call", ["record", "wait"])
    def test_hand_over_that_fails_changes_nothing(self, bench: Bench, call: str) -> None:
        """The old home keeps the block."""
        block = bench.heap.take(SIZE, bench.a)
        bench.device.fail(call)
        with pytest.raises(DeviceError):
            bench.retire.hand_over(block, bench.b)
        assert bench.heap.info(block).stream == bench.a


class TestPolling:
    @pytest.mark.parametrize(("done", "queries"), [(40, 1), (0, 2), (1, 8), (17, 8), (39, 8)])
    def test_finds_how_far_a_stream_has_come_in_few_questions(self, bench: Bench, done: int, queries: int) -> None:
        """Fences of one stream finish in order: where all or none are done one or two answers tell, else log n do."""
        stream = bench.device.stream_of(bench.retire.streams[bench.a])
        epochs = []
        for _ in range(40):
            stream.launch(1.0)
            epochs.append(bench.retire.fence(bench.a))
        bench.device.advance(done + 0.5)
        assert bench.retire.poll() == done
        assert bench.calls()["query"] <= queries
        assert [bench.heap.entry_state(bench.a, epoch) == DONE for epoch in epochs] == [n < done for n in range(40)]
        assert bench.retire.counts().open_fences == 40 - done

    def test_of_a_lost_device_says_so_and_can_be_repeated(self, bench: Bench) -> None:
        """The error does not wedge the polling."""
        bench.retire.fence(bench.a)
        bench.device.fail("query")
        with pytest.raises(DeviceError):
            bench.retire.poll()
        assert bench.retire.poll() == 1

    def test_keeps_the_fences_that_nobody_polls_from_piling_up(self, bench: Bench) -> None:
        """A program that only ever records does not collect fences for ever."""
        most = 0
        for _ in range(5000):
            bench.retire.fence(bench.a)
            most = max(most, bench.retire.counts().open_fences)
        assert most <= 256


class TestSettling:
    def test_needs_nothing_where_all_is_done(self, bench: Bench) -> None:
        """No fence is left to wait for, and no driver call is made."""
        assert bench.retire.settle(()) is True
        assert bench.calls() == {}

    def test_waits_until_the_host_has_seen_the_fences(self, bench: Bench) -> None:
        """Then, and only then, the segment can be given back."""
        device = Simulated()
        heap = bench.heap
        retire = Retire(heap, device)
        stream = device.default_stream
        segment = device.allocate_segment(SIZE)
        stream.launch(1.0, writes=[segment])
        entry = (0, heap.open_epoch(0))
        assert heap.entry_state(*entry) != DONE
        assert retire.settle([entry]) is True
        assert heap.entry_state(*entry) == DONE
        device.free_segment(segment)

    def test_gives_up_after_its_timeout(self, bench: Bench) -> None:
        """False means that the entries are still not done."""
        stream = bench.device.stream_of(bench.retire.streams[bench.a])
        stream.launch(1.0)
        entry = (bench.a, bench.heap.open_epoch(bench.a))
        assert bench.retire.settle([entry], timeout=0.001) is False
        assert bench.heap.entry_state(*entry) != DONE


class TestRegistering:
    def test_is_idempotent_and_starts_with_the_default_stream(self, bench: Bench) -> None:
        """One stream, one index."""
        stream = bench.device.create_stream()
        assert bench.retire.register(bench.device.default_stream) == 0
        assert bench.retire.register(stream) == bench.retire.register(stream) == 3
        assert bench.retire.streams[3] is stream
