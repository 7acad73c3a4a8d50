"""Records tell what happened in pools: all of it, once, in its order, with who did it."""

import asyncio
import contextlib
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import trio

from asyncmem import AsyncMemoryPool, InvalidRequest, OutOfMemoryError, PoolTimeout, tag
from asyncmem.devices import Simulated
from asyncmem.insight import Kind, Level, Recording, Records, Site

from .support import KIB, MIB, Program, need_consistent


def here() -> int:
    """The line of the caller."""
    return sys._getframe(1).f_lineno


def kinds(records: Records, *wanted: Kind) -> list[tuple[Kind, int]]:
    return [(one.kind, one.nbytes) for one in records if not wanted or one.kind in wanted]


@pytest.mark.parametrize("device", ["simulated", "host"])
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.may_block
@pytest.mark.asyncio
async def test_a_random_program_is_recorded_as_it_was(device: str, seed: int) -> None:
    """Each buffer is there once with its size, what is live adds up at any time, and the peak is the program's."""
    async with AsyncMemoryPool(device, limit="256 MiB") as pool:
        program = Program(pool, seed)
        await program.run(30)
        early = len(program.live)
        program.peak, before = program.held, len(program.taken)
        async with Recording(pool) as recording:
            await program.run(300)
        records = recording.records()
        need_consistent(records)
        assert [one.nbytes for one in records.of(Kind.ALLOCATED)] == program.taken[before:]
        assert len(records.of(Kind.HELD)) == early
        assert records.peak().nbytes == program.peak
        assert sum(one.nbytes for one in records.live_at()) == program.held
        assert records.lost == 0
        assert not records.note
        program.live.clear()


@pytest.mark.may_block
@pytest.mark.asyncio
async def test_growth_is_recorded_as_growth_and_not_as_a_wait() -> None:
    """A wait is a request that stood behind other holders of memory; one that grew has its growth and its duration."""
    async with AsyncMemoryPool("simulated", limit="64 MiB", segment_size="8 MiB") as pool, Recording(pool) as recording:
        held = await asyncio.gather(*(pool.allocate_async(MIB) for _ in range(20)))
        assert recording.records().of(Kind.GREW)
        assert not recording.records().of(Kind.WAITED)
        assert pool.stats().growth_waits == 20
        rest = await pool.allocate_batch([MIB] * 44)
        async with asyncio.TaskGroup() as group:
            waiting = group.create_task(pool.allocate_async(MIB))
            await asyncio.sleep(0)
            held.pop().free()
        waiting.result().free()
        assert [one.nbytes for one in recording.records().of(Kind.WAITED)] == [MIB]
        rest.free()
        del held


@pytest.mark.may_block
@pytest.mark.asyncio
async def test_a_ring_that_overflows_still_adds_up() -> None:
    """The oldest records are dropped and counted; what was live before the rest is there as held from the start."""
    async with AsyncMemoryPool("simulated", limit="256 MiB") as pool:
        program = Program(pool, 5)
        async with Recording(pool, keep=1000) as recording:
            await program.run(30)
            for _ in range(4):
                await program.run(1200)
                records = recording.records()
                need_consistent(records)
                assert sum(one.nbytes for one in records.live_at()) == program.held
        assert records.lost > 0
        # What was undone counts among those kept, and is left out.
        assert 900 < len(records.rows[records.rows["kind"] != Kind.HELD]) < 2 * 4096
        reserved = sum(one.nbytes for one in records.of(Kind.GREW)) - sum(
            one.nbytes for one in records.of(Kind.TRIMMED)
        )
        assert reserved == pool.stats().reserved_bytes
        program.live.clear()


@pytest.mark.may_block
@pytest.mark.asyncio
async def test_a_record_names_the_line_the_task_the_tag_and_the_thread() -> None:
    """The line is the program's own, whatever ways of asyncmem lie between, and a free has those of its allocation."""

    async def work() -> None:
        await named()
        with tag("outer"):
            (await pool.allocate_async(10)).free()
            await asyncio.create_task(inner(), name="inner")
            (await pool.allocate_async(40, tag="given")).free()

    async def inner() -> None:
        await named()
        (await pool.empty((5,), "float32")).buffer.free()
        with tag("inmost"):
            pool.allocate(30).free()

    async with AsyncMemoryPool("simulated") as pool:
        with Recording(pool) as recording:
            line = here() + 1
            pool.allocate(5).free()
            await asyncio.create_task(work(), name="outer task")
        records = recording.records()
    freed = list(records.of(Kind.FREED))
    assert [(one.nbytes, one.tag) for one in freed] == [
        (5, None), (10, "outer"), (20, "outer"), (30, "inmost"), (40, "given"),
    ]  # fmt: skip
    assert [one.task for one in freed[1:]] == ["outer task", "inner", "inner", "outer task"]
    site = freed[0].site
    assert site is not None
    assert (site.file, site.line) == (__file__, line)
    assert {one.site.function.rpartition(".")[2] for one in freed[1:] if one.site} == {"work", "inner"}
    assert {one.thread for one in freed} == {threading.current_thread().name}
    assert [group.name for group in records.of(Kind.FREED).by("tag")] == ["given", "inmost", "outer", "?"]
    # A buffer counts once, though its free is a record as well.
    assert [(one.name, one.nbytes, one.allocations) for one in records.by("tag")] == [
        ("given", 40, 1), ("inmost", 30, 1), ("outer", 30, 2), ("?", 5, 1),
    ]  # fmt: skip


def test_as_many_frames_are_kept_as_are_asked_for() -> None:
    """Innermost first, without those of asyncmem; recordings that want fewer have more while others want them."""

    def outer() -> None:
        inner()

    def inner() -> None:
        pool.allocate_arrays([(3,)]).free()

    with AsyncMemoryPool("simulated") as pool:
        with Recording(pool, frames=2) as two, Recording(pool) as beside:
            outer()
        with Recording(pool) as one:
            outer()
    for recording in (two, beside):
        frames = recording.records().of(Kind.ALLOCATED)[0].frames
        assert [site.function.rpartition(".")[2] for site in frames] == ["inner", "outer"]
    assert len(one.records().of(Kind.ALLOCATED)[0].frames) == 1


@pytest.mark.asyncio
async def test_a_wait_is_recorded_with_its_end_and_who_waited() -> None:
    """What was granted, timed out or cancelled; the allocation is the requester's, whoever frees, and took as long."""
    async with AsyncMemoryPool(Simulated(), limit="4 MiB", segment_size="4 MiB") as pool:
        with Recording(pool) as recording:
            with tag("first"):
                whole = await pool.allocate_async(4 * MIB)
            with tag("granted"):
                granted = asyncio.create_task(take(pool, MIB), name="waiter")
            await until_waiting(pool, 1)
            with pytest.raises(PoolTimeout):
                await pool.allocate_async(2 * MIB, timeout=0.001)
            cancelled = asyncio.create_task(take(pool, 3 * MIB))
            await until_waiting(pool, 2)
            cancelled.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await cancelled
            whole.free()
            await granted
            granted = None  # type: ignore[assignment]
        records = recording.records()
    waits = {one.nbytes: one for one in records.of(Kind.WAITED)}
    assert {nbytes: one.outcome for nbytes, one in waits.items() if nbytes < 4 * MIB} == {
        MIB: "granted", 2 * MIB: "timed out", 3 * MIB: "cancelled",
    }  # fmt: skip
    taken = next(one for one in records.of(Kind.ALLOCATED) if one.nbytes == MIB)
    assert (taken.task, taken.tag, taken.level) == ("waiter", "granted", Level.MISS)
    assert waits[MIB].task == "waiter"
    assert waits[MIB].duration >= waits[2 * MIB].duration > 0
    assert waits[2 * MIB].duration <= taken.duration <= waits[MIB].duration
    need_consistent(records)


async def named() -> None:
    """Wait until the task has its name: one that begins eagerly gets it after its first step on some Pythons."""
    await asyncio.sleep(0)


async def take(pool: AsyncMemoryPool, nbytes: int) -> None:
    await named()
    (await pool.allocate_async(nbytes)).free()


async def until_waiting(pool: AsyncMemoryPool, count: int) -> None:
    while pool.stats().waiting < count:  # noqa: ASYNC110 -- a pool tells nobody who waits
        await asyncio.sleep(0)


@pytest.mark.may_block
@pytest.mark.asyncio
async def test_growth_trims_pressure_and_refusals_are_recorded() -> None:
    """Memory that comes and goes adds up to what is reserved; each change of pressure and each refusal is there."""
    async with AsyncMemoryPool(Simulated(), limit="8 MiB", segment_size="4 MiB") as pool:
        with Recording(pool) as recording:
            buffer = await pool.allocate_async(7 * MIB)
            with pytest.raises(OutOfMemoryError):
                pool.allocate(9 * MIB)
            buffer.free()
            await pool.trim()
        records = recording.records()
        grown = sum(one.nbytes for one in records.of(Kind.GREW))
        assert grown - sum(one.nbytes for one in records.of(Kind.TRIMMED)) == pool.stats().reserved_bytes == 0
        assert grown >= 7 * MIB
    assert [one.outcome for one in records.of(Kind.PRESSURE)] == ["HIGH", "LOW"]
    (refused,) = records.of(Kind.OUT_OF_MEMORY)
    assert refused.nbytes == 9 * MIB
    assert refused.site == Site(__file__, refused.frames[0].line, refused.frames[0].function)


def test_memory_that_is_there_when_recording_begins_counts_as_grown() -> None:
    """So what was reserved at any time can be added up: segments by their addresses, at the beginning."""
    with AsyncMemoryPool("simulated", limit="64 MiB", segment_size="8 MiB") as pool:
        held = pool.allocate(20 * MIB)
        with Recording(pool) as recording:
            more = pool.allocate(20 * MIB)
        reserved = pool.stats().reserved_bytes
        segments = {(one.address, one.nbytes) for one in pool.segments()}
        held.free()
        more.free()
    grown = list(recording.records().of(Kind.GREW))
    assert grown[0].time == 0
    assert sum(one.nbytes for one in grown) == reserved
    assert {(one.address, one.nbytes) for one in grown} == segments


def test_levels_say_what_served() -> None:
    """Growth, free memory, the cache of the stream, or another stream's memory."""
    with AsyncMemoryPool("simulated", limit="64 MiB", segment_size="8 MiB", overlap=0) as pool:
        one, other = (pool.device.create_stream() for _ in range(2))
        with Recording(pool) as recording:
            pool.allocate(8 * MIB, stream=one).free()
            pool.allocate(8 * MIB, stream=other).free()
    assert [record.level for record in recording.records().of(Kind.ALLOCATED)] == [Level.MISS, Level.FOREIGN]
    with AsyncMemoryPool("simulated") as pool, Recording(pool) as recording:
        for _ in range(4):
            pool.allocate(64 * KIB).free()
    first, *_, last = recording.records().of(Kind.ALLOCATED)
    assert (first.level, last.level) == (Level.MISS, Level.STREAM_CACHE)


def test_threads_are_told_apart() -> None:
    """Each allocation has the name of the thread that asked, each free that of the thread that freed."""
    ready = threading.Barrier(3)

    def work(count: int) -> str:
        ready.wait(60)
        for _ in range(count):
            pool.allocate(count).free()
        return threading.current_thread().name

    with AsyncMemoryPool("simulated") as pool:
        with Recording(pool) as recording, ThreadPoolExecutor(3, "worker") as threads:
            names = list(threads.map(work, (100, 200, 300)))
        records = recording.records()
    need_consistent(records)
    for name, count in zip(names, (100, 200, 300), strict=True):
        assert {one.thread for one in records if one.nbytes == count and one.number >= 0} == {name}
    assert len(records.of(Kind.FREED)) == 600


def test_all_pools_are_recorded_also_those_to_come() -> None:
    """A recording without pools follows every pool of the process."""
    with AsyncMemoryPool("simulated", name="there before") as before, Recording() as recording:
        held = before.allocate(10)
        with AsyncMemoryPool("simulated", name="opened later") as later:
            later.allocate(20).free()
        held.free()
        records = recording.records()
    assert kinds(records.in_pool("there before"), Kind.ALLOCATED, Kind.FREED) == [
        (Kind.ALLOCATED, 10), (Kind.FREED, 10),
    ]  # fmt: skip
    assert kinds(records.in_pool("opened later"), Kind.ALLOCATED) == [(Kind.ALLOCATED, 20)]
    need_consistent(records)


def test_recordings_overlap_and_nobody_is_left_recorded() -> None:
    """Each has what came between its own ends; after the last the doors ask no questions any more."""
    with AsyncMemoryPool("simulated") as pool:
        core = pool._opened.core
        with Recording(pool) as first:
            pool.allocate(1).free()
            with Recording(pool) as second:
                kept = pool.allocate(2)
            assert core.witness is not None
            kept.free()
        assert core.witness is None
        assert not core.logged
        pool.allocate(3).free()
    both = Kind.ALLOCATED, Kind.FREED
    assert kinds(second.records(), *both) == [(Kind.ALLOCATED, 2)]
    assert kinds(first.records(), *both) == [
        (Kind.ALLOCATED, 1), (Kind.FREED, 1), (Kind.ALLOCATED, 2), (Kind.FREED, 2),
    ]  # fmt: skip


def test_a_recording_is_for_one_block() -> None:
    """Used twice, or asked before it begins, it says so; what it may be given is checked."""
    with AsyncMemoryPool("simulated") as pool:
        recording = Recording(pool)
        with pytest.raises(InvalidRequest, match="has begun"):
            recording.records()
        with recording:
            pass
        with pytest.raises(InvalidRequest, match="not used before"):
            recording.__enter__()
    with pytest.raises(InvalidRequest, match="frames"):
        Recording(frames=0)
    with pytest.raises(InvalidRequest, match="keep"):
        Recording(keep=0)
    with pytest.raises(InvalidRequest, match="keep"):
        Recording(keep="many")  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="column"):
        recording.records().by("colour")
    with pytest.raises(InvalidRequest, match="tag"), tag(5):  # type: ignore[arg-type]
        pass


@pytest.mark.anyio
async def test_trio_tasks_have_names_too() -> None:
    """The task is the one that runs, on trio as well."""
    async with AsyncMemoryPool("simulated") as pool:
        async with Recording(pool) as recording:
            (await pool.allocate_async(10)).free()
        (taken,) = recording.records().of(Kind.ALLOCATED)
    assert taken.task == trio.lowlevel.current_task().name


@pytest.mark.fake_only
@pytest.mark.usefixtures("driver")
def test_a_gpu_is_recorded_like_any_device() -> None:
    """Nothing depends on whose memory it is."""
    with AsyncMemoryPool("cuda:0", limit="64 MiB") as pool, Recording(pool) as recording:
        pool.allocate(MIB).free()
    assert kinds(recording.records(), Kind.ALLOCATED, Kind.FREED) == [(Kind.ALLOCATED, MIB), (Kind.FREED, MIB)]


def test_a_look_costs_no_more_the_more_looks_there_were() -> None:
    """What each look took out lies apart until it is asked for; how many such parts there are is not counted anew."""
    with AsyncMemoryPool("simulated") as pool, Recording(pool) as recording:
        (tap,) = recording._recorded

        def fastest_hundred() -> float:
            def hundred() -> float:
                started = time.perf_counter()
                for _ in range(100):
                    pool.allocate(512).free()
                    tap.collect()
                return time.perf_counter() - started

            return min(hundred() for _ in range(10))

        early = fastest_hundred()
        for _ in range(12_000):
            pool.allocate(512).free()
            tap.collect()
        late = fastest_hundred()
        assert late < 5 * early, (late, early)


def test_records_are_taken_by_place_and_by_slices_that_go_forwards() -> None:
    """A slice is records again, with the same names and times; what cannot be meant is refused."""
    with AsyncMemoryPool("simulated") as pool, Recording(pool) as recording:
        for _ in range(4):
            pool.allocate(MIB, tag="mine").free()
    records = recording.records()
    part = records[1:5:2]
    assert isinstance(part, Records)
    assert list(part) == list(records)[1:5:2]
    assert (part.began, part.names, records[-1]) == (records.began, records.names, list(records)[-1])
    assert len(records[100:]) == 0
    with pytest.raises(InvalidRequest, match="forwards"):
        records[::-1]
    for wrong, error in ((2**70, IndexError), ("kind", TypeError), (1.5, TypeError), (len(records), IndexError)):
        with pytest.raises(error):
            records[wrong]  # type: ignore[call-overload]  # that is the point
