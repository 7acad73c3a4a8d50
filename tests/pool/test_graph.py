"""Captured work: a graph that is launched again never meets memory that somebody else has by then."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from functools import partial

import pytest

from asyncmem import AsyncMemoryPool, Buffer, InvalidRequest, LeakWarning, PoolClosed
from asyncmem.devices import Host, Simulated, SimulatedGraph, SimulatedStream
from asyncmem.testing import SteppedPool, run_steps
from tests.conservation import refillable, whole
from tests.sweeps import Scenario, Stage, sweep, sweep_on_trio

from .support import MIB, quick_device

LIMIT = 16 * MIB


@pytest.fixture
def device() -> Simulated:
    """A device whose calls take no time."""
    return quick_device()


def write(buffer: Buffer, stream: SimulatedStream | None = None) -> None:
    """Write to a buffer for a second, on its home if no other stream is named."""
    on = stream or buffer.stream
    assert isinstance(on, SimulatedStream)
    on.launch(1.0, writes=[buffer])


def churn(pool: AsyncMemoryPool, device: Simulated) -> None:
    """Have two streams use all the memory there is to be had."""
    for stream in (device.create_stream(), device.default_stream):
        buffers = []
        while (buffer := pool.try_allocate(MIB, stream=stream)) is not None:
            write(buffer)
            buffers.append(buffer)
        for buffer in buffers:
            buffer.free()


def capture(pool: AsyncMemoryPool, stream: SimulatedStream, *, hold: list[Buffer]) -> SimulatedGraph:
    """Capture two steps, the second of which may have the first one's memory; what is in `hold` stays alive."""
    stream.begin_capture()
    first = pool.allocate(MIB, stream=stream)
    write(first)
    first.free()
    second = pool.allocate(MIB, stream=stream)
    write(second)
    hold.append(second)
    return stream.end_capture()


def test_launched_graph_meets_nobody_in_its_memory(device: Simulated) -> None:
    """Its blocks and their pages stay, freed or not, until they are released; then they serve everybody, in order."""
    stream = device.create_stream()
    with AsyncMemoryPool(device, limit=LIMIT, segment_size=4 * MIB) as pool:
        hold: list[Buffer] = []
        with pool.graph() as memory:
            graph = capture(pool, stream, hold=hold)
        hold.pop().free()
        assert (memory.nbytes, pool.stats().captured_bytes, pool.stats().allocated_bytes) == (MIB, MIB, MIB)
        for _ in range(3):
            churn(pool, device)
            pool.empty_cache()
            graph.launch(stream)
            device.create_stream().wait(stream.record())
        pool.check()
        graph.launch(stream)
        memory.release()
        memory.release()
        assert (memory.nbytes, memory.released, pool.stats().captured_bytes) == (0, True, 0)
        everything = pool.allocate(LIMIT, stream=device.create_stream(), timeout=60)
        write(everything)
        everything.free()
        whole(pool)
    assert device.reserved == 0


def test_memory_freed_inside_serves_the_same_capture_again(device: Simulated) -> None:
    """In the order of its stream, and of that one alone."""
    stream, other = device.create_stream(), device.create_stream()
    with AsyncMemoryPool(device, limit=LIMIT) as pool:
        with pool.graph() as memory:
            for one in (stream, other):
                one.begin_capture()
            first = pool.allocate(MIB, stream=stream)
            address = first.address
            assert first.stream is stream
            first.free()
            elsewhere = pool.allocate(MIB, stream=other)
            assert elsewhere.address != address
            again = pool.allocate(MIB - 100, stream=stream, tag="again")
            assert (again.address, again.nbytes, again.tag, again.stream) == (address, MIB - 100, "again", stream)
            shared = pool.allocate(2 * MIB, stream=stream)
            place = shared.address
            shared.free(stream=other)
            assert pool.allocate(2 * MIB, stream=stream).address != place
            again.free()
            elsewhere.free()
            assert "open" in repr(memory)
            for one in (stream, other):
                one.end_capture()
        memory.release()
        whole(pool)


def test_captured_stream_is_refused_outside_of_a_block(device: Simulated) -> None:
    """Every way to ask says what to do instead, and nothing has been taken."""
    stream = device.create_stream()
    with AsyncMemoryPool(device, limit=LIMIT) as pool:
        budget = pool.budget("part", limit=MIB)
        ways: list[Callable[[], object]] = [
            partial(pool.allocate, MIB, stream=stream),
            partial(pool.allocate_async, MIB, stream=stream),
            partial(pool.allocate_batch, [MIB, MIB], stream=stream),
            partial(pool.try_allocate, MIB, stream=stream),
            partial(budget.allocate, MIB, stream=stream),
        ]
        stream.begin_capture()
        for way in ways:
            with pytest.raises(InvalidRequest, match=r"pool\.graph"):
                way()
        with pool.graph(device.create_stream()), pytest.raises(InvalidRequest, match=r"pool\.graph"):
            pool.allocate(MIB, stream=stream)
        with pool.graph(stream) as memory, pytest.raises(InvalidRequest, match="not being captured"):
            pool.lease(MIB, stream=stream).__enter__()
        assert stream.end_capture().records == 0
        memory.release()
        whole(pool)


@pytest.mark.parametrize("watch", [True, False])
def test_hits_are_looked_at_unless_that_is_switched_off(device: Simulated, *, watch: bool) -> None:
    """A capture without a block is noticed also where memory is ready; the question can be spared."""
    stream = device.create_stream()
    with AsyncMemoryPool(device, limit=LIMIT, watch_captures=watch) as pool:
        pool.allocate(MIB, stream=stream).free()
        stream.begin_capture()
        if watch:
            for ask in (pool.allocate, pool.allocate_async, pool.try_allocate):
                with pytest.raises(InvalidRequest, match=r"pool\.graph"):
                    ask(MIB, stream=stream)
            pool.configure(watch_captures=False)
        pool.allocate(MIB, stream=stream).free()
        pool.configure(watch_captures=True)
        with pytest.raises(InvalidRequest, match=r"pool\.graph"):
            pool.allocate_batch([MIB], stream=stream)
        stream.end_capture()


@pytest.mark.may_block  # the worker's calls are steps of the loop
@pytest.mark.parametrize("held", [MIB, LIMIT])
def test_misses_are_looked_at_in_any_case(device: Simulated, held: int) -> None:
    """A capture neither grows nor waits in the queue, also where hits are not looked at."""
    stream = device.create_stream()

    async def main() -> None:
        async with SteppedPool(device, limit=LIMIT, segment_size=MIB, watch_captures=False) as pool:
            (await pool.allocate_async(MIB, stream=stream)).free()  # the pool serves this loop from here on
            kept = await pool.allocate_async(held, stream=stream)
            stream.begin_capture()
            with pytest.raises(InvalidRequest, match=r"pool\.graph"):
                pool.allocate_async(LIMIT // 2, stream=stream)
            assert pool.stats().waiting == 0
            stream.end_capture()
            kept.free()

    run_steps(main())


def test_nobody_asks_streams_that_are_never_captured() -> None:
    """The host's pools pay nothing."""
    for device, asked in ((Host(), False), (quick_device(), True)):
        with AsyncMemoryPool(device, limit=LIMIT) as pool:
            assert pool._core.watch_captures is asked


def test_much_released_memory_has_its_fence_at_once(device: Simulated) -> None:
    """Frees of little memory share one; a graph's counts with all its bytes, of which most of the pool's are here."""
    stream = device.create_stream()
    with AsyncMemoryPool(device, limit="8 MiB", segment_size="8 MiB") as pool:
        with pool.graph() as memory:
            stream.begin_capture()
            pool.allocate("6 MiB", stream=stream).free()
            stream.end_capture()
        before = len(device.calls_of("record_all"))
        memory.release()
        assert len(device.calls_of("record_all")) == before + 1


def test_blocks_are_entered_once_and_released_after_their_end(device: Simulated) -> None:
    """Anything else is a wrong call."""
    pool = AsyncMemoryPool(device, limit=LIMIT)
    with pool:
        with pool.graph() as memory:
            with pytest.raises(InvalidRequest, match="block has ended"):
                memory.release()
            with pytest.raises(InvalidRequest, match="not entered before"):
                memory.__enter__()
        memory.release()
        with pytest.raises(InvalidRequest, match="not entered before"):
            memory.__enter__()
        with pytest.raises(InvalidRequest, match="stream"):
            pool.graph(quick_device().create_stream())
    with pytest.raises(PoolClosed):
        pool.graph()


def test_other_streams_are_served_as_ever_during_a_capture(device: Simulated) -> None:
    """Only what is asked for on a captured stream is the graph's."""
    stream, other = device.create_stream(), device.create_stream()
    with AsyncMemoryPool(device, limit=LIMIT, segment_size=MIB) as pool:
        with pool.graph() as memory:
            before = pool.allocate(MIB, stream=stream)
            before.free()
            stream.begin_capture()
            ordinary = pool.allocate(MIB, stream=other)
            write(ordinary)
            ordinary.free()
            stream.end_capture()
            after = pool.allocate(MIB, stream=stream)
            write(after)
            after.free()
        assert memory.nbytes == 0
        memory.release()
        whole(pool)


def test_no_fence_is_recorded_into_a_capture(device: Simulated) -> None:
    """What is freed meanwhile in the order of the captured stream stays out of other streams' reach until it ends."""
    stream, other = device.create_stream("captured"), device.create_stream("other")
    with AsyncMemoryPool(device, limit=4 * MIB, segment_size=4 * MIB) as pool:
        whole_of_it = pool.allocate(4 * MIB, stream=other)
        write(whole_of_it)
        stream.wait(other.record())
        write(whole_of_it, stream)
        stream.begin_capture()
        whole_of_it.free(stream=stream)
        assert pool.try_allocate(4 * MIB, stream=device.default_stream) is None
        pool._opened.tick()
        assert stream.end_capture().records == 0
        again = pool.allocate(4 * MIB, stream=device.default_stream, timeout=60)
        write(again)
        again.free()
        home = pool.allocate(4 * MIB, stream=stream)
        write(home)
        stream.begin_capture()
        home.free()
        assert pool.try_allocate(4 * MIB, stream=other) is None
        assert stream.end_capture().records == 0
        device.run_until_idle()
        whole(pool)


def test_ordering_another_stream_in_a_capture_is_refused(device: Simulated) -> None:
    """A fence cannot cross the border of a capture, in either direction; naming the same stream is fine."""
    stream, other = device.create_stream(), device.create_stream()
    with AsyncMemoryPool(device, limit=LIMIT) as pool:
        with pool.graph() as memory:
            ordinary = pool.allocate(MIB, stream=other)
            stream.begin_capture()
            captured = pool.allocate(MIB, stream=stream)
            for call in (ordinary.use_on, ordinary.hand_over):
                with pytest.raises(InvalidRequest, match="not being captured"):
                    call(stream)
            for call in (captured.use_on, captured.hand_over):
                with pytest.raises(InvalidRequest, match="not being captured"):
                    call(other)
                call(stream)
            assert stream.end_capture().records == 0
            captured.free()
            ordinary.free()
        memory.release()


@pytest.mark.may_block
@pytest.mark.parametrize("segments", ["stream_ordered", "direct", "paged"])
def test_growth_for_a_capture_is_no_part_of_it(segments: str) -> None:
    """Segments come in the order of a stream that runs, and are there before the graph can be launched."""
    device = quick_device()
    stream = device.create_stream()

    async def main() -> None:
        async with SteppedPool(device, limit=LIMIT, segments=segments, zero_segments=True) as pool:
            with pool.graph() as memory:
                stream.begin_capture()
                buffer = await pool.allocate_async(MIB, stream=stream)
                pair = await pool.allocate_batch([MIB, 0, 2 * MIB], stream=stream)
                for one in (buffer, pair[0], pair[2]):
                    write(one)
                graph = stream.end_capture()
            assert (len(graph), graph.records) == (3, 0)
            buffer.free()
            pair.free()
            graph.launch(stream)
            graph.launch(stream)
            memory.release()
            device.run_until_idle()
            whole(pool)
            await refillable(pool, LIMIT)

    run_steps(main())


def test_busy_memory_is_none_for_a_capture(device: Simulated) -> None:
    """What some stream still works on, the captured one included, is not behind anything that a launch is behind."""
    stream = device.create_stream()
    with AsyncMemoryPool(device, limit=LIMIT, segment_size=MIB) as pool:
        busy = pool.allocate(MIB, stream=stream)
        write(busy)
        address = busy.address
        busy.free()
        with pool.graph() as memory:
            stream.begin_capture()
            buffer = pool.allocate(MIB, stream=stream)
            assert buffer.address != address
            write(buffer)
            graph = stream.end_capture()
        graph.launch(device.create_stream())
        buffer.free()
        memory.release()
        device.run_until_idle()
        whole(pool)


def test_buffer_that_outlives_the_release_is_an_ordinary_one(device: Simulated) -> None:
    """Its memory comes back at its free, behind the launches that may be anywhere."""
    stream, elsewhere = device.create_stream(), device.create_stream()
    with AsyncMemoryPool(device, limit=MIB, segment_size=MIB) as pool:
        with pool.graph() as memory:
            stream.begin_capture()
            buffer = pool.allocate(MIB, stream=stream)
            write(buffer)
            graph = stream.end_capture()
        memory.release()
        graph.launch(elsewhere)
        assert pool.stats().allocated_bytes == MIB
        buffer.free()
        again = pool.allocate(MIB, stream=device.default_stream, timeout=60)
        write(again)
        again.free()
        device.run_until_idle()
        whole(pool)


def test_memory_that_is_dropped_stays_and_is_told(device: Simulated) -> None:
    """The graph may still be launched, so nothing is given to anybody else."""
    stream = device.create_stream()
    pool = AsyncMemoryPool(device, limit=LIMIT, segment_size=MIB)
    pool.__enter__()
    hold: list[Buffer] = []
    with pool.graph() as memory:
        graph = capture(pool, stream, hold=hold)
    hold.pop().free()
    kept = [memory]
    del memory
    with pytest.warns(LeakWarning, match="captured graph was dropped"):
        kept.clear()
    churn(pool, device)
    graph.launch(stream)
    pool.check()
    assert pool.stats().captured_bytes == MIB
    with pytest.warns(LeakWarning, match="was closed while"):
        pool.close()


def test_release_after_the_pool_is_closed_gives_the_memory_back(device: Simulated) -> None:
    """As a buffer does that outlives its pool."""
    stream = device.create_stream()
    pool = AsyncMemoryPool(device, limit=LIMIT)
    pool.__enter__()
    hold: list[Buffer] = []
    with pool.graph() as memory:
        capture(pool, stream, hold=hold)
    hold.pop().free()
    with pytest.warns(LeakWarning):
        pool.close()
    assert device.reserved > 0
    memory.release()
    for _ in range(6000):
        if device.reserved == 0:
            break
        threading.Event().wait(0.01)
    assert device.reserved == 0


@pytest.mark.parametrize("call", ["allocate_segment", "record", "block", "record_all", "memory", "fill"])
def test_call_that_fails_loses_nothing(call: str) -> None:
    """Growth for a capture, and a release, may fail anywhere: the memory comes back all the same."""
    for nth in range(1, 6):
        device = quick_device()
        stream = device.create_stream()
        with AsyncMemoryPool(device, limit=LIMIT, segment_size=MIB, zero_segments=True) as pool:
            device.fail(call, nth)
            with pool.graph() as memory:
                stream.begin_capture()
                for _ in range(3):
                    try:
                        buffer = pool.allocate(MIB, stream=stream)
                    except RuntimeError:
                        continue
                    write(buffer)
                    buffer.free()
                graph = stream.end_capture()
            graph.launch(stream)
            memory.release()
            device.log._faults.clear()
            pool._opened.tick()
            device.run_until_idle()
            pool._opened.tick()
            everything = pool.allocate(LIMIT, timeout=60)
            write(everything)
            everything.free()
            device.run_until_idle()
            whole(pool)
        assert device.reserved == 0


class Program:
    """Captures, launches and ordinary work in any order, by somebody who keeps the rules; the checker is the judge."""

    def __init__(self, seed: int) -> None:
        self.choice = random.Random(seed)
        self.device = quick_device()
        self.streams = [self.device.create_stream() for _ in range(3)]
        self.buffers: list[Buffer] = []
        self.graphs: list[tuple[SimulatedGraph, object, SimulatedStream]] = []

    def run(self, steps: int) -> None:
        with AsyncMemoryPool(self.device, limit=LIMIT, segment_size=MIB) as pool:
            for _ in range(steps):
                self.choice.choice([self.work, self.work, self.free, self.capture, self.launch, self.end, self.look])(
                    pool
                )
            while self.buffers:
                self.free(pool)
            while self.graphs:
                self.end(pool)
            self.device.run_until_idle()
            whole(pool)
        assert self.device.reserved == 0

    def work(self, pool: AsyncMemoryPool) -> None:
        nbytes, stream = self.choice.randrange(1, MIB), self.choice.choice(self.streams)
        buffer = (
            pool.try_allocate(nbytes, stream=stream) if len(self.buffers) > 5 else pool.allocate(nbytes, stream=stream)
        )
        if buffer is not None:
            write(buffer)
            self.buffers.append(buffer)

    def free(self, _: AsyncMemoryPool) -> None:
        if self.buffers:
            self.buffers.pop(self.choice.randrange(len(self.buffers))).free()

    def capture(self, pool: AsyncMemoryPool) -> None:
        if len(self.graphs) == 3:
            return
        stream = self.choice.choice(self.streams)
        with pool.graph(stream) as memory:
            stream.begin_capture()
            for _ in range(self.choice.randrange(1, 6)):
                buffer = pool.allocate(self.choice.choice([4096, 100_000]), stream=stream)
                write(buffer)
                if self.choice.random() < 0.7:
                    self.free(pool)
                buffer.free()
            graph = stream.end_capture()
        assert graph.records == 0
        self.graphs.append((graph, memory, stream))

    def launch(self, _: AsyncMemoryPool) -> None:
        if self.graphs:
            graph, _, stream = self.choice.choice(self.graphs)
            graph.launch(stream)

    def end(self, _: AsyncMemoryPool) -> None:
        if self.graphs:
            _, memory, _ = self.graphs.pop(self.choice.randrange(len(self.graphs)))
            memory.release()  # type: ignore[attr-defined]  # a GraphMemory

    def look(self, pool: AsyncMemoryPool) -> None:
        self.device.advance(self.choice.random())
        pool._opened.retire.poll()
        pool.empty_cache()


@pytest.mark.parametrize("seed", range(8))
def test_random_programs_with_captures_touch_no_memory_out_of_order(seed: int) -> None:
    """Whatever is captured, launched, released and churned around it."""
    Program(seed).run(150)


async def captures_under_cancellation(stage: Stage) -> None:
    """Two captures wait for memory among ordinary requests; whoever is cancelled leaves nothing behind."""
    device = quick_device()
    async with SteppedPool(device, limit=4 * MIB, segment_size=MIB, stall_after=None) as pool:

        async def record(stream: SimulatedStream) -> None:
            memory = pool.graph(stream)
            try:
                with memory:
                    stream.begin_capture()
                    async with stage.watch(pool.allocate_async(2 * MIB, stream=stream)) as first:
                        write(first)
                    async with pool.allocate_async(2 * MIB, stream=stream) as second:
                        write(second)
            finally:
                stream.end_capture()
                memory.release()

        async def use(stream: SimulatedStream) -> None:
            async with stage.watch(pool.allocate_async(3 * MIB, stream=stream)) as buffer:
                write(buffer)
                await stream.synchronize()

        for number, actor in enumerate((use, record, use, record)):
            stage.actor(f"{actor.__name__} {number}", partial(actor, device.create_stream()))
        await stage.finish()
        device.run_until_idle()
        pool._opened.tick()
        whole(pool)
        await refillable(pool, 4 * MIB)


@pytest.mark.may_block
def test_cancelling_anybody_at_any_step_loses_nothing() -> None:
    """Neither memory nor order."""
    play: Scenario = captures_under_cancellation
    assert sweep(play).strikes > 20
    assert sweep_on_trio(play, stride=2).strikes > 10
