"""How long does one allocation hold its caller's thread while an allocator grows from nothing?"""

import asyncio
import time
from collections.abc import Callable, Iterator
from typing import Final, TypeAlias

from asyncmem.cli.benchmarks.churn import random_plan
from asyncmem.cli.benchmarks.device.measured import Measured, timed
from asyncmem.cli.benchmarks.measure import Effort, collector_off, summary
from asyncmem.cli.benchmarks.peers.ours import Ours
from asyncmem.cli.benchmarks.peers.peer import Peer
from asyncmem.cli.benchmarks.stall import LARGEST, SMALLEST, percentile
from asyncmem.cli.benchmarks.watch import WatchedLoop

QUESTION: Final = "400 blocks of 64 KiB to 128 MiB, all kept, from nothing: how long one holds the caller's thread"
COUNT: Final = 400
RUNS: Final = 5

Runs: TypeAlias = list[list[int]]
"""The nanoseconds of each allocation of each run."""


def sizes(effort: Effort) -> list[int]:
    """Answer the sizes, the same in every run and for everybody."""
    return [size for _, size in random_plan(max(10, round(COUNT * effort.share)), 1, SMALLEST, LARGEST)]


def measure(peer: Peer, effort: Effort) -> Iterator[Measured]:
    """Grow several times from nothing; asyncmem by `await` first, and by its synchronous call beside the others."""
    wanted = sizes(effort)
    if isinstance(peer, Ours):
        yield from _figures(peer.name, _repeat(lambda: _awaited(peer, wanted)))
        yield from _figures(f"{peer.name} allocate()", _repeat(lambda: _called(peer, wanted)))
    else:
        unlike = peer.unlike.get("growth")
        yield from _figures(peer.name, _repeat(lambda: _called(peer, wanted)), unlike)


def _repeat(run: Callable[[], list[int]]) -> Runs:
    with collector_off():
        return [run() for _ in range(RUNS)]


def _figures(name: str, runs: Runs, unlike: str | None = None) -> Iterator[Measured]:
    over = round(sum(held > 50_000 for run in runs for held in run) / len(runs))
    for case, share in (("longest", 1.0), ("p99", 0.99), ("p50", 0.5)):
        found = summary([percentile(run, share) for run in runs])
        yield timed("growth", name, found, case=case, unlike=unlike, allocations=len(runs[0]), over_50_us=over)


def _called(peer: Peer, wanted: list[int]) -> list[int]:
    held, kept, clock = [], [], time.perf_counter_ns
    with peer.opened() as way:
        take, give = way.take(), way.give()
        for size in wanted:
            start = clock()
            kept.append(take(size))
            held.append(clock() - start)
        give(kept, wanted)
    return held


def _awaited(peer: Ours, wanted: list[int]) -> list[int]:
    loop = WatchedLoop()
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        return runner.run(_grow(loop, peer, wanted))


async def _grow(loop: WatchedLoop, peer: Ours, wanted: list[int]) -> list[int]:
    """Answer how long each allocation held the loop; nothing else is on it."""
    held, kept = [], []
    async with peer.pool() as pool:
        for size in wanted:
            start = loop.held_ns()
            kept.append(await pool.allocate_async(size))
            held.append(loop.held_ns() - start)
        kept.clear()
    return held
