"""The rows of a device about growth: how long one allocation holds its caller's thread, and another task waits."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, nullcontext
from dataclasses import replace
from typing import Final, TypeAlias

from asyncmem import Buffer
from asyncmem.cli.bench.event_loop import GROWING, GROWING_SIZES, WatchedLoop, run_watched
from asyncmem.cli.bench.timing import Effort, collector_off, percentile, random_plan, summary
from benchmarks.allocators import Allocator, AsyncmemPool, index_of
from benchmarks.driver import empty_launches
from benchmarks.suite import Measured, Task, timed

RUNS: Final = 5
PATIENCE_SECONDS: Final = 60.0
"""How long one run may take."""

Runs: TypeAlias = list[list[int]]
"""The nanoseconds of each allocation of each run."""
Tick: TypeAlias = Callable[[], None]
"""What a ticking task does each time it is resumed."""


def sizes(effort: Effort) -> list[int]:
    """Return the sizes, the same in every run and for every allocator."""
    return [size for _, size in random_plan(max(10, round(GROWING * effort.share)), 1, *GROWING_SIZES)]


def growth(peer: Allocator, task: Task) -> Iterator[Measured]:
    """Allocate 400 blocks of 64 KiB to 128 MiB from nothing, and time how long each one holds the caller's thread.

    asyncmem is measured by `await` first, and by its synchronous call beside the others.
    """
    wanted = sizes(task.effort)
    if isinstance(peer, AsyncmemPool):
        yield from _figures(peer, _repeat(lambda: run_watched(lambda loop: _awaited(loop, peer, wanted))))
        for one in _figures(peer, _repeat(lambda: _called(peer, wanted))):
            yield replace(one, peer=f"{peer.name} allocate()")
    else:
        yield from _figures(peer, _repeat(lambda: _called(peer, wanted)))


def _repeat(run: Callable[[], list[int]]) -> Runs:
    with collector_off():
        return [run() for _ in range(RUNS)]


def _figures(peer: Allocator, runs: Runs) -> Iterator[Measured]:
    over = round(sum(held > 50_000 for run in runs for held in run) / len(runs))
    for case, share in (("longest", 1.0), ("p99", 0.99), ("p50", 0.5)):
        found = summary([percentile(run, share) for run in runs])
        yield timed("growth", peer, found, case=case, allocations=len(runs[0]), over_50_us=over)


def _called(peer: Allocator, wanted: list[int]) -> list[int]:
    held, kept, clock = [], [], time.perf_counter_ns
    with peer.opened() as calls:
        take = calls.take()
        try:
            for size in wanted:
                start = clock()
                kept.append(take(size))
                held.append(clock() - start)
        finally:
            calls.give(kept, wanted)
    return held


async def _awaited(loop: WatchedLoop, peer: AsyncmemPool, wanted: list[int]) -> list[int]:
    """Return how long each allocation held the loop; nothing else is on it."""
    held, kept = [], []
    # A device that is too small would have the last of them wait for ever.
    async with peer.pool() as pool, asyncio.timeout(PATIENCE_SECONDS):
        try:
            for size in wanted:
                start = loop.held_ns()
                kept.append(await pool.allocate_async(size))
                held.append(loop.held_ns() - start)
        finally:
            kept.clear()
    return held


# -- loop_stall: how much longer a task waits for its turn meanwhile ---------------------------------------------------

STALL_RUNS: Final = 9
STALL_WARM_UP: Final = 1


def loop_stall(peer: Allocator, task: Task) -> Iterator[Measured]:
    """Measure a ticking task's longest wait during that growth, the longest without any, and the difference.

    The task asks for its turn again and again, and each time launches an empty kernel and records a fence, so that
    contention inside the driver shows, too. The longest gap between two of its turns is compared with the longest of
    as many turns with no growth at all, in the same process, run after run in turn.
    """
    card = task.device.startswith("cuda")
    ticking_work = empty_launches(index_of(task.device)) if card else nullcontext(_do_nothing)
    with ticking_work as tick, collector_off():
        found = task.effort.run(_stalls(peer, sizes(task.effort), tick))
    grown, still = (summary(gaps) for gaps in found)
    # Medians: a single run's longest gap is as often the machine's as the allocator's.
    more = grown.median_ns - still.median_ns
    figure = timed(
        "loop_stall",
        peer,
        grown,
        still,
        floor_median_ns=still.median_ns,
        more_ns=round(more),
        longest_ns=max(found[0]),
        floor_longest_ns=max(found[1]),
    )
    alone = None if isinstance(peer, AsyncmemPool) else "its call holds the loop itself: there is nothing to await"
    yield replace(figure, unlike=alone)


def _do_nothing() -> None:
    """Stand in for a launch on a device that has no kernels."""


async def _stalls(peer: Allocator, wanted: list[int], tick: Tick) -> tuple[list[int], list[int]]:
    grown, still = [], []
    for run in range(STALL_WARM_UP + STALL_RUNS):
        watched = await (
            _grow_awaiting(peer, wanted, tick) if isinstance(peer, AsyncmemPool) else _grow(peer, wanted, tick)
        )
        # As many turns as the growth took: a maximum over more of them would be larger by that alone.
        quiet = await _idle(watched.ticks, tick)
        if run >= STALL_WARM_UP:
            grown.append(watched.longest)
            still.append(quiet.longest)
    return grown, still


async def _grow_awaiting(peer: AsyncmemPool, wanted: list[int], tick: Tick) -> "Ticker":
    kept: list[Buffer] = []
    async with peer.pool() as pool:
        async with ticking(tick) as ticker, asyncio.timeout(PATIENCE_SECONDS):
            kept.extend([await pool.allocate_async(size) for size in wanted])
        kept.clear()
    return ticker


async def _grow(peer: Allocator, wanted: list[int], tick: Tick) -> "Ticker":
    kept = []
    with peer.opened() as calls:
        take = calls.take()
        try:
            async with ticking(tick) as ticker:
                for size in wanted:
                    kept.append(take(size))
                    await asyncio.sleep(0)
        finally:
            calls.give(kept, wanted)
    return ticker


async def _idle(ticks: int, tick: Tick) -> "Ticker":
    async with ticking(tick) as ticker:
        # Another task that always wants its turn, as the one that allocates does.
        while ticker.ticks < ticks:  # noqa: ASYNC110 - its turns are what is wanted, not to be woken
            await asyncio.sleep(0)
    return ticker


class Ticker:
    """A task that yields to the loop again and again until it is stopped, and keeps the longest time until its turn."""

    def __init__(self, tick: Tick) -> None:
        self.tick = tick
        self.running = True
        self.ticks = 0
        self.longest = 0

    async def run(self) -> None:
        """Tick."""
        last = time.perf_counter_ns()
        while self.running:
            self.tick()
            await asyncio.sleep(0)
            now = time.perf_counter_ns()
            self.longest = max(self.longest, now - last)
            last = now
            self.ticks += 1


@asynccontextmanager
async def ticking(tick: Tick) -> AsyncIterator[Ticker]:
    """Run a ticking task beside the block; its gaps are those of the block alone."""
    ticker = Ticker(tick)
    task = asyncio.create_task(ticker.run())
    await asyncio.sleep(0)
    try:
        yield ticker
    finally:
        ticker.running = False
        await task
