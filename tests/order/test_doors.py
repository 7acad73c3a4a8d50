"""The compiled ways of buffers and allocations through the order of streams, over a device with a table of calls."""

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from asyncmem import AsyncMemoryPool, Buffer
from asyncmem.core import Notes, Retire
from asyncmem.devices import SimulatedStream
from asyncmem.errors import DeviceError, InvalidRequest

from .native import NativeSimulated

KIB = 1024
SIZE = 64 * KIB


class Bench:
    """A pool whose four blocks stream a has had; it knows stream b as well."""

    def __init__(self) -> None:
        self.device = NativeSimulated(8 * SIZE, autojump=False)
        self.pool = AsyncMemoryPool(
            self.device, limit=4 * SIZE, segment_size=4 * SIZE, small_limit=512, overlap=0, defragment=False
        )
        self.a, self.b = self.device.create_stream("a"), self.device.create_stream("b")
        held = [self.pool.allocate(SIZE, stream=self.a, timeout=60) for _ in range(4)]
        held[0].hand_over(self.b)
        held[0].hand_over(self.a)
        for buffer in held:
            buffer.free()
        self.device.advance(1.0)
        self.retire.poll()
        self.pool._opened.core.flush()
        self.before = dict(self.device.called)

    @property
    def retire(self) -> Retire:
        return self.pool._opened.retire

    def calls(self) -> dict[str, int]:
        """What the table has made since the beginning; `order` makes a record and a wait."""
        since = {name: count - self.before[name] for name, count in self.device.called.items()}
        return {name: count for name, count in since.items() if count and name not in {"capturing", "order"}}

    def take(self, stream: SimulatedStream) -> Buffer:
        buffer = self.pool.try_allocate(SIZE, stream=stream)
        assert buffer is not None
        return buffer

    def exhaust(self, stream: SimulatedStream) -> list[Buffer]:
        """Take all there is."""
        return [self.take(stream) for _ in range(4)]


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    assert bench.device.problems == []
    bench.device.advance(100.0)
    bench.pool.check()
    bench.pool.close()
    assert bench.device.reserved == 0


@pytest.fixture
def python_is_not_asked(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the pool's slower ways fail."""

    def asked(*_: object, **__: object) -> None:
        pytest.fail("the core asked the pool")

    for name in ("_serve",):
        monkeypatch.setattr(type(bench.pool._opened), name, asked)


@pytest.mark.usefixtures("python_is_not_asked")
class TestPlainWays:
    def test_a_free_on_another_stream_costs_one_record(self, bench: Bench) -> None:
        """And nothing of Python's."""
        bench.take(bench.a).free(stream=bench.b)
        assert bench.calls() == {"record": 1}

    def test_a_free_on_the_home_stream_costs_no_call(self, bench: Bench) -> None:
        """Named or not."""
        bench.take(bench.a).free(stream=bench.a)
        bench.take(bench.a).free()
        assert bench.calls() == {}

    def test_use_on_costs_a_record_and_a_wait_and_the_free_a_record_for_each_user(self, bench: Bench) -> None:
        """However often a stream is named."""
        buffer = bench.take(bench.a)
        bench.b.launch(1.0)
        buffer.use_on(bench.b)
        assert bench.calls() == {"record": 1, "wait": 1}
        buffer.use_on(bench.device.default_stream)
        buffer.use_on(bench.b)
        assert bench.calls() == {"record": 3, "wait": 3}
        assert bench.device.called["order"] - bench.before["order"] == 3  # in one go each
        assert isinstance(buffer._notes, Notes)
        assert buffer._notes.users == {0, bench.retire.register(bench.b)}
        buffer.free(stream=bench.b)
        assert bench.calls() == {"record": 5, "wait": 3}
        assert buffer._notes is None  # so that its object can be used again

    def test_a_dropped_buffer_is_fenced_behind_its_users(self, bench: Bench) -> None:
        """As a freed one."""
        buffer = bench.take(bench.a)
        buffer.use_on(bench.b)
        bench.b.launch(1.0, reads=[buffer])
        del buffer
        assert bench.calls()["record"] == 2
        held = [bench.take(bench.a) for _ in range(3)]
        assert bench.retire.poll() <= 1
        for one in held:
            one.free()

    def test_hand_over_makes_the_new_home_wait(self, bench: Bench) -> None:
        """Then it frees as the home."""
        buffer = bench.take(bench.a)
        buffer.hand_over(bench.b)
        assert buffer.stream is bench.b
        buffer.free()
        assert bench.calls() == {"record": 1, "wait": 1}

    def test_hand_over_to_a_stream_that_is_ordered_already_makes_nobody_wait(self, bench: Bench) -> None:
        """The caller has ordered it; the buffer frees as that stream's."""
        buffer = bench.take(bench.a)
        buffer.hand_over(bench.b, ordered=True)
        assert buffer.stream is bench.b
        buffer.free()
        assert bench.calls() == {}

    def test_a_miss_asks_the_fences_and_takes_what_is_done(self, bench: Bench) -> None:
        """One question stands for all fences of a stream."""
        for buffer in bench.exhaust(bench.a):
            buffer.free(stream=bench.b)
        again = bench.exhaust(bench.a)
        assert bench.calls() == {"record": 4, "query": 1, "release": 4}
        for buffer in again:
            buffer.free()

    def test_a_miss_takes_another_streams_memory_behind_a_wait(self, bench: Bench) -> None:
        """What waits for the fewest and oldest fences first: here one that is recorded, though not reached."""
        for buffer in bench.exhaust(bench.a):
            bench.b.launch(1.0, reads=[buffer])
            buffer.free(stream=bench.b)
        bench.pool._opened.core.flush()
        buffer = bench.take(bench.b)
        assert bench.calls()["wait"] == 1
        assert bench.pool._opened.core.scheduler.gauges()["foreign"] == 1
        buffer.free()


@pytest.mark.parametrize("nth", [1, 2, 3])
@pytest.mark.parametrize("call", ["record", "wait", "query", "record_all"])
def test_a_call_that_fails_loses_nothing(bench: Bench, call: str, nth: int) -> None:
    """Wherever it comes, a release and an allocation go on; all else raises, and works when it is repeated."""
    bench.device.fail(call, nth)
    for round_ in range(3):
        for stream, other in ((bench.a, bench.b), (bench.b, bench.a)):
            buffer = bench.pool.allocate(SIZE, stream=stream, timeout=60)
            twice(partial(buffer.use_on, other))
            if round_ % 2:
                twice(partial(buffer.hand_over, other))
            buffer.free(stream=stream)
        twice(bench.retire.poll)
    bench.device.advance(10.0)
    for _ in range(2):
        twice(bench.retire.poll)
    bench.pool._opened.core.flush()
    bench.pool._opened.core.merge()
    for buffer in bench.exhaust(bench.a):
        buffer.free()


def twice(call: Callable[[], object]) -> None:
    """Call again what has failed."""
    try:
        call()
    except DeviceError:
        call()


class TestWhoGoesFirst:
    def test_a_door_takes_no_others_memory_while_somebody_waits(self, bench: Bench) -> None:
        """What is free is not enough for who waits, who may not be overtaken: the newcomer gets nothing either."""
        bench.pool.configure(bypass=0.0)
        held = bench.exhaust(bench.a)
        waiting = bench.pool.allocate_async(2 * SIZE, stream=bench.a)
        held.pop().free(stream=bench.b)
        before = bench.calls()
        assert bench.pool.try_allocate(SIZE, stream=bench.a) is None
        assert "wait" not in bench.calls()
        assert bench.calls()["record"] == before["record"]
        waiting.cancel()
        found = bench.pool.try_allocate(SIZE, stream=bench.a)
        assert found is not None
        for buffer in (found, *held):
            buffer.free()

    @pytest.mark.parametrize(("overlap", "waits"), [(1.0, 0), (4 * SIZE, 0), (4 * SIZE - 1, 1), (0.5, 1), (0, 1)])
    def test_no_stream_is_made_to_wait_where_the_pool_would_rather_grow(
        self, bench: Bench, overlap: float, waits: int
    ) -> None:
        """As long as no more is free than `overlap` says and the limit leaves room."""
        for buffer in bench.exhaust(bench.a):
            bench.b.launch(1.0, reads=[buffer])
            buffer.free(stream=bench.b)
        bench.pool._opened.core.flush()
        bench.pool.configure(limit=8 * SIZE, overlap=overlap)
        bench.pool.allocate(SIZE, stream=bench.a, timeout=60).free()
        assert bench.calls().get("wait", 0) == waits


class TestSharedFences:
    @staticmethod
    def pieces(bench: Bench, count: int, nbytes: int = SIZE // 16) -> list[Buffer]:
        return [bench.pool.allocate(nbytes, stream=bench.a) for _ in range(count)]

    def test_are_recorded_once_for_so_many_frees(self, bench: Bench) -> None:
        """Nobody else gets the memory before, and then everybody at once."""
        bench.retire.fence_every = 4
        held = self.pieces(bench, 4)
        for buffer in held[:3]:
            buffer.free(stream=bench.b)
        assert bench.calls() == {}
        held[3].free(stream=bench.b)
        assert bench.calls() == {"record": 1}
        for buffer in self.pieces(bench, 64):
            buffer.free()
        assert bench.calls() == {"record": 1, "query": 1, "release": 1}

    def test_are_recorded_early_when_memory_is_needed(self, bench: Bench) -> None:
        """A miss, and each poll, has those that are missing recorded before it asks."""
        bench.retire.fence_every = 4
        for buffer in self.pieces(bench, 2):
            bench.b.launch(1.0, reads=[buffer])
            buffer.free(stream=bench.b)
        bench.device.advance(100.0)
        for buffer in self.pieces(bench, 64):
            buffer.free()
        assert bench.calls() == {"record": 1, "query": 1, "release": 1}

    def test_hold_back_no_more_than_an_eighth_of_what_is_free(self, bench: Bench) -> None:
        """A free that would make it more has its fence recorded, and so have those before."""
        bench.retire.fence_every = 16
        held = self.pieces(bench, 3, SIZE // 4)
        held[0].free(stream=bench.b)
        assert bench.calls() == {}
        held[1].free(stream=bench.b)
        assert bench.calls() == {"record": 1}
        held[2].free(stream=bench.b)
        assert bench.calls() == {"record": 1}

    @pytest.mark.parametrize("wrong", [0, -1, 1.5, 5000])
    def test_come_in_sensible_numbers(self, bench: Bench, wrong: float) -> None:
        """Anything else is refused, and changes nothing."""
        with pytest.raises(InvalidRequest, match="fence_every"):
            bench.pool.configure(fence_every=wrong)
        assert bench.retire.fence_every == 16


class TestStreamsOfOtherKinds:
    def test_one_that_nobody_keeps_alive_is_fenced_at_the_free_even_as_the_home(self, bench: Bench) -> None:
        """Its handle may be another stream's soon after; later fences, and those of drops, stand behind all streams."""
        stream = bench.device.create_stream("mere number")
        stream.native = stream.lasting = False
        counts = bench.device.log.counts
        buffer = bench.take(stream)
        stream.launch(1.0, writes=[buffer])
        before = counts["record"]
        buffer.free()
        assert counts["record"] == before + 1
        held = [bench.take(stream), bench.take(stream)]
        before, behind_all = counts["record"], counts["record_all"]
        held.clear()  # nobody says that it is still alive, so it is asked nothing
        assert (counts["record"], counts["record_all"]) == (before, behind_all + 2)
        buffer = bench.take(stream)
        bench.device.fail("record")
        buffer.free()
        assert bench.retire.counts().failed_records == 1
        before = counts["record_all"]
        bench.retire.poll()
        assert counts["record_all"] == before + 1

    @pytest.mark.parametrize("late_fences", [True, False])
    def test_one_that_only_python_can_make_wait_gets_a_fence_of_pythons(self, bench: Bench, late_fences: bool) -> None:
        """It covers later work too, so it counts as late, and is none where such fences are not allowed."""
        stream = bench.device.create_stream("of a thread")
        stream.native = False
        bench.retire.late_fences = late_fences
        for buffer in bench.exhaust(bench.a):
            bench.b.launch(1.0, reads=[buffer])
            buffer.free(stream=bench.b)
        bench.retire.fence(bench.retire.register(bench.a))
        bench.pool._opened.core.flush()
        found = bench.pool.try_allocate(SIZE, stream=stream)
        assert (found is not None) is late_fences
        if found is not None:
            assert bench.retire.counts().late_fences > 0
            stream.launch(1.0, writes=[found])  # in order, says the checker
            found.use_on(bench.b)
            bench.b.launch(1.0, reads=[found])
            found.free()
            again = bench.take(bench.a)
            bench.a.launch(1.0, writes=[again])
            again.free()


class TestCaptures:
    def test_a_captured_stream_goes_through_no_door_when_captures_are_watched(self, bench: Bench) -> None:
        """The pool's own ways decide then; unwatched, the driver is not asked at a hit."""
        core = bench.pool._opened.core
        core.watch_captures = False
        home = bench.take(bench.a)
        home.free()  # to where its size is kept for this stream
        bench.take(bench.a).free()
        asked = bench.device.called["capturing"]
        bench.device.captured.add(bench.a.handle)
        found = bench.pool.try_allocate(SIZE, stream=bench.a)
        assert found is not None
        assert bench.device.called["capturing"] == asked
        found.free()
        core.watch_captures = True
        assert bench.retire.capturing(bench.retire.register(bench.a))
        with pytest.raises(InvalidRequest, match=r"pool\.graph"):
            bench.pool.try_allocate(SIZE, stream=bench.a)
        bench.device.captured.clear()
        found = bench.pool.try_allocate(SIZE, stream=bench.a)
        assert found is not None
        found.free()

    @pytest.mark.parametrize("captured", ["a", "b"])
    def test_neither_side_of_an_order_may_be_captured(self, bench: Bench, captured: str) -> None:
        """Nothing is recorded, nobody waits, and the pool says what is wrong."""
        buffer = bench.take(bench.a)
        getattr(bench, captured).begin_capture()
        bench.device.captured.add(getattr(bench, captured).handle)
        before = bench.device.log.counts["record"]
        for order in (buffer.use_on, buffer.hand_over):
            with pytest.raises(InvalidRequest, match="captured"):
                order(bench.b)
        assert bench.device.log.counts["record"] == before
        assert "wait" not in bench.calls()
        bench.device.captured.clear()
        getattr(bench, captured).end_capture()
        assert buffer.stream is bench.a
        buffer.free()

    def test_what_is_freed_on_a_captured_stream_comes_back_after_the_capture(self, bench: Bench) -> None:
        """A fence recorded meanwhile would be a part of the graph."""
        held = bench.exhaust(bench.a)
        bench.device.captured.add(bench.b.handle)
        held.pop().free(stream=bench.b)
        assert "record" not in bench.calls()
        assert bench.retire.poll() == 0
        assert bench.pool.try_allocate(SIZE, stream=bench.a) is None
        bench.device.captured.clear()
        assert bench.retire.poll() == 1
        bench.take(bench.a).free()
        for buffer in held:
            buffer.free()

    def test_a_driver_that_cannot_say_raises_its_error(self, bench: Bench) -> None:
        """With the name of the call and its code."""
        bench.device.fail_captures = True
        with pytest.raises(DeviceError, match="capturing"):
            bench.retire.capturing(bench.retire.register(bench.a))
        with pytest.raises(DeviceError, match="capturing"):
            bench.retire.fence(bench.retire.register(bench.a))
        bench.device.fail_captures = False


def test_notes_of_the_pool_keep_the_streams_that_the_core_has_noted(bench: Bench) -> None:
    """A buffer that is used on another stream and entered afterwards waits for that stream all the same."""
    buffer = bench.take(bench.a)
    buffer.use_on(bench.b)
    with buffer:
        buffer.use_on(bench.device.default_stream)
        bench.b.launch(1.0, reads=[buffer])
    assert bench.calls() == {"record": 4, "wait": 2}


def test_only_one_thread_at_a_time_asks_the_fences(bench: Bench) -> None:
    """Whoever comes meanwhile leaves it to the first, also who was held up by recording what was missing."""
    first_one, *held = bench.exhaust(bench.a)
    for buffer in held:
        buffer.free(stream=bench.b)
    bench.device.fail("record")
    first_one.free(stream=bench.device.default_stream)  # owes a fence, which a poll records before it asks
    recording, asking, asked = threading.Event(), threading.Event(), threading.Event()
    record, query = bench.device.call_record, bench.device.call_query

    def slow_record(stream: int, made: Any) -> int:
        recording.set()
        assert asking.wait(60)
        return record(stream, made)

    def slow_query(fence: int) -> int:
        asking.set()
        assert asked.wait(60)
        return query(fence)

    bench.device.call_record = slow_record  # type: ignore[method-assign]  # to meet at a certain point
    bench.device.call_query = slow_query  # type: ignore[method-assign]  # likewise
    found: list[int] = []

    def first() -> None:
        found.append(bench.retire.poll())
        asked.set()

    one = threading.Thread(target=first)
    one.start()
    assert recording.wait(60)
    other = threading.Thread(target=lambda: found.append(bench.retire.poll()))
    other.start()
    for thread in (one, other):
        thread.join()
        assert not thread.is_alive()
    assert found[0] == 0
    assert found[1] > 0


ENDS = """
import gc, os
from order.native import NativeSimulated
from asyncmem import AsyncMemoryPool
from asyncmem.errors import DeviceError

device = NativeSimulated()
pool = AsyncMemoryPool(device, limit=1 << 20)
a, b = device.create_stream(), device.create_stream()
buffers = [pool.allocate(4096, stream=a, timeout=60) for _ in range(8)]
for buffer in buffers[:4]:
    buffer.free(stream=b)
buffers[4].use_on(b)
calls = dict(device.called)
"""

FORKS = (
    ENDS
    + """
retire = pool._opened.retire
def touch_nothing():
    refused = 0
    for call in (lambda: retire.fence(1), lambda: retire.use_on(1, 2), lambda: retire.capturing(1),
                 lambda: retire.settle([(2, 1)])):
        try:
            call()
        except DeviceError:
            refused += 1
    assert refused == 4
    assert retire.poll() == 0
    buffers.pop().free(stream=b)
    retire.entries_for([2])

child = os.fork()
if child == 0:
    code = 1
    try:
        touch_nothing()
        del retire, pool, buffers, buffer
        gc.collect()
        code = 0 if device.called == calls else 3
    finally:
        os._exit(code)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
for buffer in buffers:
    buffer.free()
pool.close()
"""
)


@pytest.mark.parametrize("program", [ENDS, FORKS], ids=["at the end", "after a fork"])
def test_no_driver_call_is_made_when_the_driver_is_not_ours(program: str) -> None:
    """Whatever is left is dropped when the interpreter ends, and belongs to the parent of a forked process."""
    # Not by the working directory: it is kept off the path where the installed package is to be tested.
    path = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    command = [sys.executable, "-W", "ignore:This process:DeprecationWarning", "-c", program]  # of fork beside threads
    done = subprocess.run(command, env=path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
