"""How long does one allocation hold the event loop while the pool has to grow for it?

The simulated device's driver calls really take a millisecond each, and it notes which thread made them. Nothing else
runs on the loop, so all the time that it is held from one allocation to the next belongs to that allocation.
"""

import asyncio
import math
import threading
import time
from typing import Final

from asyncmem import AsyncMemoryPool
from asyncmem.cli.benchmarks.churn import random_plan
from asyncmem.cli.benchmarks.measure import Effort, summary
from asyncmem.cli.benchmarks.result import Row
from asyncmem.cli.benchmarks.watch import WatchedLoop
from asyncmem.devices import Latencies, Simulated

BOUND: Final = 1.0
QUESTION: Final = "400 growing awaited allocations, driver calls of 1 ms: p99 of one's hold on the loop, against 100 µs"
ALLOWED_NS: Final = 100_000
DRIVER_SECONDS: Final = 0.001
COUNT: Final = 400
RUNS: Final = 5
SMALLEST: Final = 64 << 10
LARGEST: Final = 128 << 20


def measure(effort: Effort) -> Row:
    """Take the best of five runs, and fail the row on any driver call on the loop's thread in any of them."""
    runs = [_on_watched_loop() for _ in range(max(1, round(RUNS * effort.share)))]
    best = summary([p99 for p99, _, _ in runs])
    on_loop = sum(on_loop for _, _, on_loop in runs)
    return Row(
        question=QUESTION,
        bound=BOUND,
        ns=best.ns,
        floor_ns=ALLOWED_NS,
        ns_median=best.median_ns,
        floor_median_ns=ALLOWED_NS,
        ratio=best.ns / ALLOWED_NS,
        figures={
            "driver_calls": sum(calls for _, calls, _ in runs) // len(runs),
            "driver_calls_on_loop_thread": on_loop,
            "executor_ns": round(_executor(), 2),
        },
        broken=f"{on_loop} driver calls on the loop's thread" if on_loop else "",
    )


def percentile(samples: list[int], share: float) -> int:
    """Answer the smallest sample that at least `share` of them do not exceed."""
    return sorted(samples)[math.ceil(share * len(samples)) - 1]


def _on_watched_loop() -> tuple[int, int, int]:
    loop = WatchedLoop()
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        return runner.run(_grow(loop))


async def _grow(loop: WatchedLoop) -> tuple[int, int, int]:
    """Answer the p99 of the hold in nanoseconds, the driver calls, and those of them on this thread."""
    device = Simulated(clock="wall", latencies=Latencies.blocking(DRIVER_SECONDS))
    async with AsyncMemoryPool(device, limit="64 GiB") as pool:
        before, kept, held = len(device.calls), [], []
        for _, size in random_plan(COUNT, 1, SMALLEST, LARGEST):
            start = loop.held_ns()
            kept.append(await pool.allocate_async(size))
            held.append(loop.held_ns() - start)
        calls = list(device.calls)[before:]
        kept.clear()
    await asyncio.to_thread(device.close)
    on_loop = sum(call.thread == threading.get_ident() for call in calls)
    return percentile(held, 0.99), len(calls), on_loop


def _executor() -> float:
    """Answer the same figure for asyncio's own way to wait for a blocking call: what a hand-over to a thread costs."""
    loop = WatchedLoop()
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        return runner.run(_sleep_elsewhere(loop))


async def _sleep_elsewhere(loop: WatchedLoop) -> float:
    held = []
    for _ in range(COUNT):
        start = loop.held_ns()
        await loop.run_in_executor(None, time.sleep, DRIVER_SECONDS)
        held.append(loop.held_ns() - start)
    return percentile(held, 0.99)
