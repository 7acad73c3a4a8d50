"""A recording of a running pool tells what the program asked for: all of it, once, in its order."""

import asyncio
import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from asyncmem import AsyncMemoryPool, Buffer, InvalidRequest, PoolClosed
from asyncmem.core import LOG_ROW, Heap, Kind
from asyncmem.replay import Op, Recorder, Trace, read, record, replay

from .support import same

KIB, MIB = 1 << 10, 1 << 20

Short = tuple[int, int]
"""What an event was, and how many bytes it was about."""


def short(trace: Trace) -> list[Short]:
    return list(zip(trace.op.tolist(), trace.nbytes.tolist(), strict=True))


def took(*sizes: int) -> list[Short]:
    return [(Op.ALLOCATE, nbytes) for nbytes in sizes]


def freed(*sizes: int) -> list[Short]:
    return [(Op.FREE, nbytes) for nbytes in sizes]


class Program:
    """A random program on several streams, with budgets, batches and leases, that counts what it holds itself.

    Attributes:
        peak: The most bytes it has held.
        takes: How often it asked for some.
        live: What it holds now.
    """

    def __init__(self, pool: AsyncMemoryPool, seed: int) -> None:
        self.peak = self.takes = 0
        self.live: list[Buffer] = []
        self._draw = random.Random(seed)
        self._pool = pool
        self._doors = [pool, pool, pool.budget("part", limit="512 MiB")]
        self._streams = [None, *(pool.device.create_stream() for _ in range(2))]

    async def step(self) -> None:
        draw = self._draw
        match draw.randrange(6):
            case 0 | 1:
                door, stream = draw.choice(self._doors), draw.choice(self._streams)
                self._hold(await door.allocate_async(self._size(), stream=stream))
            case 2:
                door = draw.choice(self._doors)
                for buffer in await door.allocate_batch([self._size() for _ in range(draw.randrange(1, 5))]):
                    self._hold(buffer)
            case 3:
                async with self._pool.lease(self._size()) as lease:
                    self._held(lease.nbytes)
                    lease.allocate(1 + lease.nbytes // 3).free()
            case _ if self.live:
                buffer = self.live.pop(draw.randrange(len(self.live)))
                buffer.free(stream=draw.choice(self._streams)) if draw.random() < 0.5 else buffer.free()

    def _size(self) -> int:
        return self._draw.choice((1, 700, 40_000, 3 * MIB, self._draw.randrange(1, 9 * MIB)))

    def _hold(self, buffer: Buffer) -> None:
        self.live.append(buffer)
        self._held(0)

    def _held(self, beside: int) -> None:
        self.takes += 1
        self.peak = max(self.peak, beside + sum(buffer.nbytes for buffer in self.live))


async def live_through(seed: int, steps: int) -> tuple[Recorder, Program, int]:
    """Record a program; return how many buffers it held at the end too."""
    async with AsyncMemoryPool("simulated", limit="4 GiB") as pool:
        program = Program(pool, seed)
        async with record(pool) as recorder:
            for _ in range(steps):
                await program.step()
        held = len(program.live)
        while program.live:
            program.live.pop().free()
        return recorder, program, held


@pytest.mark.parametrize("seed", range(4))
def test_a_replay_of_a_recording_needs_what_the_program_needed(seed: int, tmp_path: Path) -> None:
    """Recorded, saved, read and replayed, a program has the peak that it counted itself, on as many streams."""
    recorder, program, held = asyncio.run(live_through(seed, 400))
    recorder.save(tmp_path / "program.npz")
    trace = read(tmp_path / "program.npz")
    assert same(trace, recorder.trace())
    one = replay(trace)
    assert one.peak_requested == trace.peak_requested == program.peak
    assert (one.takes, one.frees) == (program.takes, program.takes - held)
    assert trace.streams == 3


def test_what_is_live_when_recording_begins_is_there_from_the_start() -> None:
    """It is allocated at time 0, and freed when it is; what was freed before is left out."""
    with AsyncMemoryPool("simulated") as pool:
        pool.allocate(70).free()
        early = pool.allocate(1000)
        with record(pool) as recorder:
            late = pool.allocate(2000)
            early.free()
        late.free()
        trace = recorder.trace()
    assert short(trace) == [*took(1000, 2000), *freed(1000)]
    assert trace.time_us[0] == 0
    assert (trace.name, trace.device, trace.note) == (pool.name, 0, "")


def test_a_lease_is_one_allocation_and_what_outlives_it_another() -> None:
    """Nothing inside counts beside its range; at its end the range goes, and what is still held stays."""
    with AsyncMemoryPool("simulated") as pool:
        with record(pool) as recorder:
            with pool.lease(MIB) as lease, lease.lease(100 * KIB) as inner:
                kept = lease.allocate(3000)
                inner.allocate(40).free()
            kept.free()
        assert short(recorder.trace()) == [*took(MIB), *freed(MIB), *took(3000), *freed(3000)]


def test_a_lease_that_is_open_when_recording_begins_counts_as_its_range() -> None:
    """What it serves already is inside."""
    with AsyncMemoryPool("simulated") as pool, pool.lease(MIB) as lease, lease.allocate(500):
        with record(pool) as recorder:
            pass
        assert short(recorder.trace()) == took(MIB)


@pytest.mark.asyncio
async def test_a_batch_is_recorded_buffer_by_buffer() -> None:
    """Taken in the order that was asked, and freed together."""
    async with AsyncMemoryPool("simulated") as pool:
        (await pool.allocate_batch([9 * KIB, 300, 70_000])).free()  # the pool grows
        async with record(pool) as recorder:
            (await pool.allocate_batch([9 * KIB, 0, 300, 70_000])).free()
        assert short(recorder.trace()) == [*took(9 * KIB, 300, 70_000), *freed(9 * KIB, 300, 70_000)]


def test_a_free_names_the_stream_that_used_the_memory_last() -> None:
    """That is the buffer's home, or the stream that the free names: a replay orders the memory behind it."""
    with AsyncMemoryPool("simulated") as pool:
        one, other, third = (pool.device.create_stream() for _ in range(3))
        with record(pool) as recorder:
            pool.allocate(10, stream=one).free()
            pool.allocate(20, stream=one).free(stream=other)
            used = pool.allocate(30, stream=one)
            used.use_on(other)
            used.free()
            moved = pool.allocate(40, stream=one)
            moved.hand_over(other)
            moved.free()
            shared = pool.allocate(50, stream=one)
            shared.use_on(other)
            shared.free(stream=third)
        *streams, last = recorder.trace().stream.tolist()
    assert streams == [1, 1, 1, 2, 1, 2, 1, 2, 1]
    assert last in {2, 3}


def test_a_take_that_is_undone_was_never_made() -> None:
    """Neither it nor its end is in the trace; the numbers of the others have no gap."""
    with AsyncMemoryPool("simulated") as pool, record(pool) as recorder:
        first = pool.allocate(100)
        core = pool._opened.core
        block, entries = core.take_foreign(200, 0) or (0, ())
        core.put_back(block, entries)
        pool.allocate(300).free()
        first.free()
        trace = recorder.trace()
    assert short(trace) == [*took(100, 300), *freed(300, 100)]
    assert trace.id.tolist() == [0, 1, 1, 0]


def test_a_heap_logs_nothing_before_and_after() -> None:
    """A reader gets what comes between its two ends, and nothing of before."""
    heap = Heap()
    heap.add_segment(1 << 30, MIB, 0, 0)
    heap.free(heap.take(5, 0))
    reader, held = heap.open_log()
    assert not held
    heap.free(heap.take(5, 0))
    assert np.frombuffer(heap.read_log(reader).rows, LOG_ROW)["kind"].tolist() == [Kind.ALLOCATED, Kind.FREED]
    heap.close_log(reader)
    heap.free(heap.take(5, 0))
    assert not heap.logged
    assert not heap.read_log(heap.open_log()[0]).rows


def test_threads_and_finalizers_are_recorded() -> None:
    """Every buffer counts once, from whatever thread, also where it is dropped rather than freed."""
    with AsyncMemoryPool("simulated", limit="1 GiB") as pool:

        def work(seed: int) -> int:
            draw = random.Random(seed)
            held: list[Buffer] = []
            for _ in range(2000):
                held.append(pool.allocate(draw.randrange(1, 5000)))
                if len(held) > 20:
                    held.pop(draw.randrange(len(held)))
            return 2000

        with record(pool) as recorder, ThreadPoolExecutor(4) as threads:
            takes = sum(threads.map(work, range(4)))
        trace = recorder.trace()
    assert trace.allocations == takes
    assert sum(trace.op == Op.FREE) == takes


@pytest.mark.asyncio
async def test_tasks_that_wait_are_recorded_when_they_are_served() -> None:
    """The order is that in which memory changed hands, so the peak stays within the pool's limit."""
    async with AsyncMemoryPool("simulated", limit="4 MiB", segment_size="1 MiB") as pool:

        async def work() -> None:
            for _ in range(5):
                async with pool.allocate_async("3 MiB"):
                    await asyncio.sleep(0)

        async with record(pool) as recorder:
            await asyncio.gather(*(work() for _ in range(4)))
        assert short(recorder.trace()) == [*took(3 * MIB), *freed(3 * MIB)] * 20


@pytest.mark.asyncio
async def test_recording_opens_a_pool() -> None:
    """Nobody has to have used it before."""
    pool = AsyncMemoryPool("simulated")
    async with record(pool) as recorder:
        (await pool.allocate_async(5)).free()
    await pool.aclose()
    assert short(recorder.trace()) == [*took(5), *freed(5)]
    with pytest.raises(PoolClosed):
        record(pool).__enter__()


def test_a_recorder_tells_what_there_is_so_far() -> None:
    """Its trace can be had while it goes on; before, there is none."""
    with AsyncMemoryPool("simulated", name="mine") as pool:
        recorder = record(pool)
        assert repr(recorder) == "<asyncmem.replay.Recorder of pool 'mine': not begun>"
        with pytest.raises(InvalidRequest, match="recorder that has begun"):
            recorder.trace()
        with recorder:
            pool.allocate(5).free()
            assert repr(recorder) == "<asyncmem.replay.Recorder of pool 'mine': going on>"
            assert short(recorder.trace()) == [*took(5), *freed(5)]
            pool.allocate(6).free()
        assert repr(recorder) == "<asyncmem.replay.Recorder of pool 'mine': over>"
        assert short(recorder.trace()) == [*took(5), *freed(5), *took(6), *freed(6)]


def test_several_record_a_pool_and_a_recorder_has_one_block() -> None:
    """Each has what comes between its own two ends; one that was used is refused."""
    with AsyncMemoryPool("simulated") as pool:
        with record(pool) as first:
            early = pool.allocate(5)
            with record(pool) as second:
                pool.allocate(6).free()
            early.free()
        with pytest.raises(InvalidRequest, match="a new recorder"):
            first.__enter__()
    assert short(first.trace()) == [*took(5, 6), *freed(6, 5)]
    assert short(second.trace()) == [*took(5, 6), *freed(6)]
    assert second.trace().time_us[0] == 0


SHORT_OF_MEMORY = """
import resource
from pathlib import Path
from asyncmem import AsyncMemoryPool
from asyncmem.replay import record

with AsyncMemoryPool("simulated") as pool, record(pool) as recorder:
    pool.allocate(64).free()
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    # 21 pages of the log, and nearly another one, which is left for all else.
    resource.setrlimit(resource.RLIMIT_AS, (used + (32 << 20) + (900 << 10), most))
    for _ in range(2_000_000):
        pool.allocate(64).free()
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
print(recorder.trace().note)
assert pool.stats().allocated_bytes == 0
assert 2000 < recorder.trace().allocations < 2_000_000
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the memory of a process is bounded as Linux does it")
def test_a_recording_without_memory_ends_and_the_program_goes_on() -> None:
    """Frees cannot fail, so it is the recording that ends, and says so."""
    found = subprocess.run([sys.executable, "-c", SHORT_OF_MEMORY], capture_output=True, text=True, check=False)
    assert (found.returncode, found.stderr) == (0, "")
    assert found.stdout == "The recording ends early: there was no memory for more of it.\n"
