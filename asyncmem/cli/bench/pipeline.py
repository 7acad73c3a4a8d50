"""What a pipeline adds to an item, and whether it keeps its slowest stage busy with memory for three items only.

The runner is held against the same three stages, which do nothing, joined by unbounded queues of asyncio. The pace is
that of stages that take 4, 10 and 4 ms and pass one buffer on, against the time that the second is at work on
an item. (The loop's timers, which stand for the work, are late by up to a millisecond, and the later the more of them
there are.)
"""

import asyncio
import itertools
import time
from typing import Final

from asyncmem import AsyncMemoryPool, Buffer
from asyncmem.cli.bench.timing import Effort, Loop, Row, Side, compare, summary, time_sides, worst_of
from asyncmem.pipeline import Pipeline, StageShare, stage

BOUND: Final = 4.0
PACE_BOUND: Final = 1.0 / 0.95
SIZE: Final = 1 << 20
LIMIT: Final = 3 * SIZE
FAST: Final = 0.004
SLOW: Final = 0.010
ITEMS: Final = 100


async def load(number: int, pool: StageShare) -> tuple[int, Buffer]:
    """Take memory, and some time."""
    buffer = await pool.allocate_async(SIZE)
    await asyncio.sleep(FAST)
    return number, buffer


@stage(credit=0)
async def compute(item: tuple[int, Buffer], _: StageShare) -> tuple[int, Buffer]:
    """Take the most time, in place."""
    await asyncio.sleep(SLOW)
    return item


@stage(credit=0)
async def finish(item: tuple[int, Buffer], _: StageShare) -> int:
    """Take some time, and let the memory go."""
    await asyncio.sleep(FAST)
    return item[0]


async def same(item: int, _: StageShare | None = None) -> int:
    """Do nothing, so that only what joins the stages costs."""
    return item


async def pipeline(effort: Effort) -> Row:
    """Time the runner, and the pace that it keeps."""
    return worst_of({"runner": await _runner(effort), "pace": await _pace(effort)})


async def _runner(effort: Effort) -> Row:
    async with AsyncMemoryPool("host", limit=LIMIT) as pool, Pipeline(same, same, same, pool=pool) as pipe:
        return compare(BOUND, *await time_sides([Side(by_pipeline(pipe), ITEMS), Side(by_queues, ITEMS)], effort))


async def _pace(effort: Effort) -> Row:
    items = max(20, round(ITEMS * effort.share))
    ours, floor = [], []
    async with AsyncMemoryPool("host", limit=LIMIT, segment_size=LIMIT) as pool:
        for _ in range(max(2, round(5 * effort.share))):
            async with Pipeline(load, compute, finish, pool=pool) as pipe:
                assert [one async for one in pipe.map(range(items))] == list(range(items))
            report = pipe.report()
            # The first item fills the pipeline and the last one empties it: no pace is kept meanwhile.
            ours.append((report.seconds - 2 * FAST) * 1e9 / items)
            floor.append(report.stages[1].busy * report.seconds * 1e9 / items)
        peak = pool.stats().peak_allocated
    broken = "more than the limit was live" if peak > LIMIT else ""
    return compare(PACE_BOUND, summary(ours), summary(floor), broken=broken, peak=peak, limit=LIMIT)


def by_pipeline(pipe: Pipeline[int, int]) -> Loop:
    """Return a loop that takes items through a pipeline, `ITEMS` a turn."""

    async def loop(turns: int) -> int:
        started = time.perf_counter_ns()
        async for _ in pipe.map(range(turns * ITEMS)):
            pass
        return time.perf_counter_ns() - started

    return loop


async def by_queues(turns: int) -> int:
    """Take them through three stages joined by unbounded queues, which cost least."""
    queues: list[asyncio.Queue[int | None]] = [asyncio.Queue() for _ in range(4)]

    async def work(before: asyncio.Queue[int | None], behind: asyncio.Queue[int | None]) -> None:
        while (item := await before.get()) is not None:
            await behind.put(await same(item))
        await behind.put(None)

    async def produce() -> None:
        for number in range(turns * ITEMS):
            await queues[0].put(number)
        await queues[0].put(None)

    started = time.perf_counter_ns()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(produce())
        for before, behind in itertools.pairwise(queues):
            tasks.create_task(work(before, behind))
        while await queues[-1].get() is not None:
            pass
    return time.perf_counter_ns() - started
