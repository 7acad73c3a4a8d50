"""What does a pipeline add to an item, and does it keep its slowest stage busy when memory is for three items only?

The runner is held against the same three stages, which do nothing, joined by unbounded queues of asyncio. The pace is
that of plain functions that take 4, 10 and 4 ms and pass one buffer on, against the time that the second is at work on
an item. (The loop's timers, which stand for the work, are late by up to a millisecond, and the later the more of them
there are.)
"""

import asyncio
import itertools
import time
from dataclasses import replace
from typing import Final

from asyncmem import AsyncMemoryPool, Buffer
from asyncmem.cli.benchmarks.measure import Effort, Loop, interleave, summary
from asyncmem.cli.benchmarks.result import Row, compare, worst_of
from asyncmem.pipeline import Pipeline, StageShare

BOUND: Final = 4.0
PACE_BOUND: Final = 1.0 / 0.95
QUESTION: Final = "an item through three stages, against asyncio.Queue; stages of 4, 10, 4 ms against the slowest"
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


async def compute(item: tuple[int, Buffer], _: StageShare) -> tuple[int, Buffer]:
    """Take the most time, in place."""
    await asyncio.sleep(SLOW)
    return item


async def finish(item: tuple[int, Buffer], _: StageShare) -> int:
    """Take some time, and let the memory go."""
    await asyncio.sleep(FAST)
    return item[0]


async def same(item: int, _: StageShare | None = None) -> int:
    """Do nothing, so that only what joins the stages costs."""
    return item


def measure(effort: Effort) -> Row:
    """Time the runner, and the pace that it keeps."""
    return worst_of(QUESTION, {"runner": effort.run(_runner(effort)), "pace": effort.run(_pace(effort))})


async def _runner(effort: Effort) -> Row:
    async with AsyncMemoryPool("host", limit=LIMIT) as pool, Pipeline(same, same, same, pool=pool) as pipe:
        timings = await interleave([by_pipeline(pipe), by_queues], effort, per_turn=ITEMS)
    return compare(QUESTION, BOUND, *timings)


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
    row = compare(QUESTION, PACE_BOUND, summary(ours), summary(floor), peak=peak, limit=LIMIT)
    return replace(row, broken="more than the limit was live") if peak > LIMIT else row


def by_pipeline(pipe: Pipeline[int, int]) -> Loop:
    """Answer a loop that takes items through a pipeline, `ITEMS` a turn."""

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
