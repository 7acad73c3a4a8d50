"""How much longer does a task wait for its turn while an allocator grows beside it, than while nothing does?

The task asks for its turn again and again, and each time launches an empty kernel and records a fence, so that
contention inside the driver shows, too. The longest gap between two of its turns is compared with the longest of as
many turns with no growth at all, in the same process, run after run in turn.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Final

from asyncmem import Buffer
from asyncmem.cli.benchmarks.device import growth
from asyncmem.cli.benchmarks.device.kernels import EmptyLaunch, Launches, launch_nothing
from asyncmem.cli.benchmarks.device.measured import Measured, timed
from asyncmem.cli.benchmarks.device.where import Where
from asyncmem.cli.benchmarks.measure import Effort, collector_off, summary
from asyncmem.cli.benchmarks.peers.family import index_of
from asyncmem.cli.benchmarks.peers.ours import Ours
from asyncmem.cli.benchmarks.peers.peer import Peer

QUESTION: Final = "a ticking task's longest wait during that growth, against its longest without any"
RUNS: Final = 9
WARM_UP: Final = 1


def measure(peer: Peer, effort: Effort, where: Where) -> Iterator[Measured]:
    """Answer the longest gap with growth, the floor beside it, and how much longer it was."""
    card = where.device.startswith("cuda")
    tick = EmptyLaunch(index_of(where.device)) if card else launch_nothing
    try:
        with collector_off():
            found = effort.run(_runs(peer, growth.sizes(effort), tick))
    finally:
        if isinstance(tick, EmptyLaunch):
            tick.close()
    grown, still = (summary(gaps) for gaps in found)
    # Medians: a single run's longest gap is as often the machine's as the allocator's.
    more = grown.median_ns - still.median_ns
    yield timed(
        "loop_stall",
        peer.name,
        grown,
        still,
        floor_median_ns=still.median_ns,
        more_ns=round(more),
        longest_ns=max(found[0]),
        floor_longest_ns=max(found[1]),
        unlike=None if isinstance(peer, Ours) else "its call holds the loop itself: there is nothing to await",
    )


async def _runs(peer: Peer, wanted: list[int], tick: Launches) -> tuple[list[int], list[int]]:
    grown, still = [], []
    for run in range(WARM_UP + RUNS):
        watched = await (_grow_awaiting(peer, wanted, tick) if isinstance(peer, Ours) else _grow(peer, wanted, tick))
        # As many turns as the growth took: a maximum over more of them would be larger by that alone.
        quiet = await _idle(watched.ticks, tick)
        if run >= WARM_UP:
            grown.append(watched.longest)
            still.append(quiet.longest)
    return grown, still


async def _grow_awaiting(peer: Ours, wanted: list[int], tick: Launches) -> "Ticker":
    kept: list[Buffer] = []
    async with peer.pool() as pool:
        async with ticking(tick) as ticker, asyncio.timeout(growth.PATIENCE_SECONDS):
            kept.extend([await pool.allocate_async(size) for size in wanted])
        kept.clear()
    return ticker


async def _grow(peer: Peer, wanted: list[int], tick: Launches) -> "Ticker":
    kept = []
    with peer.opened() as way:
        take, give = way.take(), way.give()
        try:
            async with ticking(tick) as ticker:
                for size in wanted:
                    kept.append(take(size))
                    await asyncio.sleep(0)
        finally:
            give(kept, wanted)
    return ticker


async def _idle(ticks: int, tick: Launches) -> "Ticker":
    async with ticking(tick) as ticker:
        # Another task that always wants its turn, as the one that allocates does.
        while ticker.ticks < ticks:  # noqa: ASYNC110 - its turns are what is wanted, not to be woken
            await asyncio.sleep(0)
    return ticker


class Ticker:
    """Asks for its turn until it is told to end, and keeps the longest time that it had to wait for it."""

    def __init__(self, tick: Launches) -> None:
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
async def ticking(tick: Launches) -> AsyncIterator[Ticker]:
    """Have a task tick while the block runs; what comes before and after is not in its gaps."""
    ticker = Ticker(tick)
    task = asyncio.create_task(ticker.run())
    await asyncio.sleep(0)
    try:
        yield ticker
    finally:
        ticker.running = False
        await task
