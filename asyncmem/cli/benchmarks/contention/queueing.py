"""A hundred thousand requests for memory that is not there: to queue them, to cancel them, to have them expire."""

import asyncio
import random
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Final

from asyncmem import AsyncMemoryPool
from asyncmem.cli.benchmarks.contention.programs import LIMIT, draw_plan
from asyncmem.cli.benchmarks.measure import Effort, collector_off
from asyncmem.cli.benchmarks.result import Row, Timing, compare
from asyncmem.core import Request

REQUESTS: Final = 100_000
QUEUED: Final = 2.0
CANCELLED: Final = 3.0
EXPIRED: Final = 2.0
"""Seconds that each may take for all."""
BYTES: Final = 1024
"""The most that a request may take of the process's memory."""
MARGIN: Final = 0.5
"""Seconds between the last request and the deadline of all."""

Queue = list[Request[object]]


def measure_queue(effort: Effort) -> dict[str, Row]:
    """Time what is done to all of them at once; what is allowed goes by how many there are."""
    count = max(1_000, round(REQUESTS * effort.share))
    with collector_off():
        queued, nbytes, cancelled = effort.run(_in_full_pool(lambda pool: _cancel(pool, count)))
        (expired,) = effort.run(_in_full_pool(lambda pool: _expire(pool, count)))
    part = count / REQUESTS
    cases = {
        f"queue {count:,} requests": _row(queued, QUEUED * part),
        f"cancel {count:,} in any order": _row(cancelled, CANCELLED * part),
        f"expire {count:,} together": _row(expired, EXPIRED * part),
    }
    first = next(iter(cases))
    broken = f"a request takes {nbytes:.0f} bytes, more than {BYTES}" if nbytes > BYTES else ""
    figures: dict[str, float | int | str] = {"bytes_each": round(nbytes), "bytes_allowed": BYTES, "bytes_by": _how()}
    return cases | {first: replace(cases[first], figures=figures, broken=broken)}


def _row(seconds: float, allowed: float) -> Row:
    ours = Timing(ns=1e9 * seconds, median_ns=1e9 * seconds)
    limit = Timing(ns=1e9 * allowed, median_ns=1e9 * allowed)
    return compare("all of them at once, against what is allowed", 1.0, ours, limit)


async def _in_full_pool(
    measure: Callable[[AsyncMemoryPool], Awaitable[tuple[float, ...]]],
) -> tuple[float, ...]:
    async with AsyncMemoryPool("host", limit=LIMIT, segment_size=LIMIT) as pool:
        full = await pool.allocate_async(LIMIT)
        found = await measure(pool)
        full.free()
        return found


async def _cancel(pool: AsyncMemoryPool, count: int) -> tuple[float, ...]:
    sizes = [nbytes for nbytes, _ in draw_plan(count, 0)]
    before = used_memory()
    started = time.perf_counter()
    queue: Queue = [pool.allocate_async(nbytes) for nbytes in sizes]  # type: ignore[misc]  # none of them is a hit
    queued = time.perf_counter() - started
    each = (used_memory() - before) / count
    await asyncio.sleep(0)
    random.Random(1).shuffle(queue)  # noqa: S311  # no secret
    started = time.perf_counter()
    for request in queue:
        request.cancel()
    return queued, each, time.perf_counter() - started


async def _expire(pool: AsyncMemoryPool, count: int) -> tuple[float, ...]:
    loop = asyncio.get_running_loop()
    sizes = [nbytes for nbytes, _ in draw_plan(count, 0)]
    until = loop.time() + MARGIN + 2 * QUEUED * count / REQUESTS
    queue: Queue = [
        pool.allocate_async(nbytes, timeout=until - loop.time())  # type: ignore[misc]  # none of them is a hit
        for nbytes in sizes
    ]
    await asyncio.sleep(until - loop.time())
    while not all(request.done() for request in queue):  # noqa: ASYNC110  # nothing tells of the last one
        await asyncio.sleep(0)
    return (loop.time() - until,)


def _how() -> str:
    return "resident set" if _STATM.exists() else "largest resident set"


_STATM: Final = Path("/proc/self/statm")


def used_memory() -> int:
    """Return the bytes of the process that are in memory, those of the compiled core among them."""
    import resource

    if _STATM.exists():
        return int(_STATM.read_text(encoding="ascii").split()[1]) * resource.getpagesize()
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
