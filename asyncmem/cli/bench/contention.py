"""The cost of a step where tasks want more memory than there is, and of a hundred thousand waiting requests.

Every task takes memory, sleeps for half a millisecond or not at all, and gives it back. Beside it the same tasks share
a semaphore with sixteen permits: the least cost of waiting in a queue, in the same process.
"""

import asyncio
import itertools
import math
import random
import statistics
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from typing import Any, Final, TypeAlias

import anyio

from asyncmem import AsyncMemoryPool, Batch, Budget, Buffer
from asyncmem.cli.bench.timing import Effort, Number, Row, Timing, collector_off, compare, summary, worst_of
from asyncmem.cli.machine import installed_version
from asyncmem.core import Request
from asyncmem.pool.loops import EventLoop, Timer

SHARE: Final = 0.6
"""The least share of a semaphore's steps a second, on asyncio."""
GROWTH: Final = 1.5
"""How much a step may grow from the fewest tasks to the most."""
PROOFS: Final = 0.01
"""The most of the time that may be spent on looking for deadlocks."""

LIMIT: Final = 16 << 20
SIZES: Final = (512, 4 << 20)
PAUSE: Final = 0.0005
PERMITS: Final = 16
STEPS: Final = 20_000
EACH: Final = 3
"""Steps of each task at least."""
FEWEST_STEPS: Final = 200
MINUTE: Final = 60
BUDGETS: Final = 100
DEEP: Final = 3
MOST_REPEATS: Final = 3

Sleep: TypeAlias = Callable[[float], Awaitable[object]]
Step: TypeAlias = Callable[[int, float], Awaitable[object]]
"""One step of a task: how many bytes, and how long they are held."""
Work: TypeAlias = Callable[[AsyncMemoryPool, int, Sleep], Step]
"""Makes the steps of a task by its number."""


def contention(effort: Effort) -> Row:
    """Time the queue first, in a process as small as it is, then every program with every number of tasks."""
    cases = _measure_queue(effort)
    for program in PROGRAMS:
        if program.loop and installed_version(program.loop) is None:
            continue
        counts = [program.threads] if program.threads else effort.tasks
        parts = {f"{program.name}, {count:,}": _measure(program, count, effort) for count in counts}
        cases |= parts
        if program.bounded and len(parts) > 1:
            few, many = list(parts.values())[:: len(parts) - 1]
            cases[f"{program.name}, growth"] = compare(GROWTH, many.ours, few.ours)
    return worst_of(cases)


def _measure(program: "Program", count: int, effort: Effort) -> Row:
    """Time both sides in turn."""
    steps = max(round(STEPS * effort.share), EACH * count, FEWEST_STEPS)
    times, floor, shares = [], [], []
    with collector_off():
        for _ in range(max(1, min(MOST_REPEATS, effort.repeats // 5))):
            with proof_seconds() as spent:
                times.append(_run(program, count, steps, effort, semaphore=False))
            shares.append(sum(spent) / (times[-1] * steps / 1e9))
            floor.append(_run(program, count, steps, effort, semaphore=True))
    row = compare(1 / SHARE if program.bounded else inf, summary(times), summary(floor))
    proofs = statistics.median(shares)
    figures: dict[str, Number] = {
        "program": program.name,
        "tasks": count,
        "steps_per_second": round(1e9 / row.ours.ns),
        "floor_steps_per_second": round(1e9 / row.floor.ns),
        "share": round(row.floor.ns / row.ours.ns, 3),
        "least_share": SHARE if program.bounded else 0,
        "proofs_share": round(proofs, 5),
    }
    broken = f"{proofs:.1%} of the time went into looking for deadlocks" if proofs > PROOFS else ""
    return replace(row, figures=figures, broken=broken)


@contextmanager
def proof_seconds() -> Iterator[list[float]]:
    """Note how long each search for a deadlock takes: a callback of the loop, which is wrapped as it is set."""
    spent: list[float] = []
    plain = EventLoop.call_at

    def call_at(loop: EventLoop, when: float, callback: Callable[[], object]) -> Timer:
        def look() -> None:
            started = time.perf_counter()
            callback()
            spent.append(time.perf_counter() - started)

        return plain(loop, when, look if getattr(callback, "__name__", "") == "look_for_deadlock" else callback)

    EventLoop.call_at = call_at  # type: ignore[assignment, method-assign]
    try:
        yield spent
    finally:
        EventLoop.call_at = plain  # type: ignore[method-assign]


# -- a program, in nanoseconds a step ----------------------------------------------------------------------------------


def _run(program: "Program", count: int, steps: int, effort: Effort, *, semaphore: bool) -> float:
    if program.threads:
        return _threads(count, steps, semaphore=semaphore)
    if program.loop == "trio":
        import trio

        gate = trio.Semaphore(PERMITS) if semaphore else None
        found: float = trio.run(_tasks, program, count, steps, gate, trio.sleep)
        return found
    loop = replace(effort, uvloop=effort.uvloop or program.loop == "uvloop")
    return loop.run(_tasks(program, count, steps, asyncio.Semaphore(PERMITS) if semaphore else None, asyncio.sleep))


async def _tasks(program: "Program", count: int, steps: int, semaphore: Any, sleep: Sleep) -> float:  # noqa: ANN401  # asyncio's or trio's
    plan = draw_plan(steps, program.size)

    async def through_semaphore(_: int, pause: float) -> None:
        async with semaphore:
            await sleep(pause)

    async with AsyncMemoryPool("host", limit=LIMIT) as pool:

        async def task(number: int) -> None:
            step = program.work(pool, number, sleep) if semaphore is None else through_semaphore
            for nbytes, pause in plan:
                await step(nbytes, pause)

        started = time.perf_counter_ns()
        if program.loop == "trio":
            async with anyio.create_task_group() as group:
                for number in range(count):
                    group.start_soon(task, number)
        else:
            await asyncio.gather(*[task(number) for number in range(count)])
        return (time.perf_counter_ns() - started) / steps


def draw_plan(steps: int, size: int = 0) -> Iterator[tuple[int, float]]:
    """Draw the bytes and the pause of each step: half of them sleep, and sizes are even over their logarithm."""
    draw = random.Random(1)  # noqa: S311  # no secret
    least, most = map(math.log, SIZES)
    return iter([(size or int(math.exp(draw.uniform(least, most))), draw.choice((0.0, PAUSE))) for _ in range(steps)])


def _threads(count: int, steps: int, *, semaphore: bool) -> float:
    plan = list(draw_plan(steps))
    numbers = itertools.count()
    gate = threading.Semaphore(PERMITS)

    def work() -> None:
        while (number := next(numbers)) < steps:
            nbytes, pause = plan[number]
            if semaphore:
                with gate:
                    time.sleep(pause)
            else:
                buffer = pool.allocate(nbytes, timeout=MINUTE)
                time.sleep(pause)
                buffer.free()

    with AsyncMemoryPool("host", limit=LIMIT) as pool:
        threads = [threading.Thread(target=work) for _ in range(count)]
        started = time.perf_counter_ns()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return (time.perf_counter_ns() - started) / steps


# -- the steps of each program -----------------------------------------------------------------------------------------

Take: TypeAlias = Callable[[int], Awaitable[Buffer | Batch]]


def _by(take_of: Callable[[AsyncMemoryPool, int], Take]) -> Work:
    def make(pool: AsyncMemoryPool, number: int, sleep: Sleep) -> Step:
        take = take_of(pool, number)

        async def step(nbytes: int, pause: float) -> None:
            taken = await take(nbytes)
            await sleep(pause)
            taken.free()

        return step

    return make


def _in_budgets(pool: AsyncMemoryPool, number: int) -> Take:
    """Take from one of the pool's budgets, which are three deep. The first task makes them."""
    budgets = [one for one in pool._inside if isinstance(one, Budget)]
    above: AsyncMemoryPool | Budget = pool
    for made in range(len(budgets), BUDGETS):
        above = (above if made % DEEP else pool).budget(str(made), limit=LIMIT)
        budgets.append(above)
    return budgets[DEEP * (number % (BUDGETS // DEEP)) + DEEP - 1].allocate_async


def _entered(pool: AsyncMemoryPool, number: int, sleep: Sleep) -> Step:  # noqa: ARG001
    async def step(nbytes: int, pause: float) -> None:
        async with pool.allocate_async(nbytes):
            await sleep(pause)

    return step


def _in_leases(pool: AsyncMemoryPool, number: int, sleep: Sleep) -> Step:  # noqa: ARG001
    async def step(nbytes: int, pause: float) -> None:
        async with pool.lease(nbytes) as lease:
            buffer = await lease.allocate_async(nbytes)
            await sleep(pause)
            buffer.free()

    return step


_plain: Final = _by(lambda pool, _: pool.allocate_async)


@dataclass(frozen=True)
class Program:
    """One kind of tasks.

    Attributes:
        name: Its name in the results.
        work: Makes a task's steps.
        size: Bytes of each step; 0 for random ones.
        loop: The event loop: asyncio's as the effort says, or that of another package, "uvloop" or "trio".
        threads: How many threads there are in place of tasks.
    """

    name: str
    work: Work = _plain
    size: int = 0
    loop: str = ""
    threads: int = 0

    @property
    def bounded(self) -> bool:
        """Whether it is compared with the bounds, which are about asyncio."""
        return not self.loop and not self.threads


PROGRAMS: Final = (
    Program("one size", size=1 << 20),
    Program("mixed sizes"),
    Program("async with", _entered),
    Program("timeouts", _by(lambda pool, _: lambda nbytes: pool.allocate_async(nbytes, timeout=MINUTE))),
    Program("batches of 3", _by(lambda pool, _: lambda nbytes: pool.allocate_batch([nbytes // 3] * 3))),
    Program("3 priorities", _by(lambda pool, number: lambda nbytes: pool.allocate_async(nbytes, priority=number % 3))),
    Program("100 budgets", _by(_in_budgets)),
    Program("leases", _in_leases),
    Program("trio", loop="trio"),
    Program("uvloop", loop="uvloop"),
    Program("threads", threads=8),
)


# -- a hundred thousand requests for memory that is not there: to queue, to cancel, to expire --------------------------

REQUESTS: Final = 100_000
QUEUED: Final = 2.0
CANCELLED: Final = 3.0
EXPIRED: Final = 2.0
"""Seconds that each may take for all."""
BYTES: Final = 1024
"""The most that a request may take of the process's memory."""
MARGIN: Final = 0.5
"""Seconds between the last request and the deadline of all."""

Queue: TypeAlias = list[Request[object]]
Measure: TypeAlias = Callable[[AsyncMemoryPool, list[int]], Awaitable[tuple[float, ...]]]


def _measure_queue(effort: Effort) -> dict[str, Row]:
    """Time to queue, cancel and expire all requests; the time allowed is proportional to their number."""
    count = max(1_000, round(REQUESTS * effort.share))
    with collector_off():
        queued, nbytes, cancelled = effort.run(_in_full_pool(_cancel, count))
        (expired,) = effort.run(_in_full_pool(_expire, count))
    part = count / REQUESTS
    broken = f"a request takes {nbytes:.0f} bytes, more than {BYTES}" if nbytes > BYTES else ""
    figures: dict[str, Number] = {
        "bytes_each": round(nbytes),
        "bytes_allowed": BYTES,
        "bytes_by": "resident set" if _STATM.exists() else "largest resident set",
    }
    return {
        f"queue {count:,} requests": replace(_row(queued, QUEUED * part), figures=figures, broken=broken),
        f"cancel {count:,} in any order": _row(cancelled, CANCELLED * part),
        f"expire {count:,} together": _row(expired, EXPIRED * part),
    }


def _row(seconds: float, allowed: float) -> Row:
    return compare(1.0, *(Timing(ns=1e9 * one, median_ns=1e9 * one) for one in (seconds, allowed)))


async def _in_full_pool(measure: Measure, count: int) -> tuple[float, ...]:
    async with AsyncMemoryPool("host", limit=LIMIT, segment_size=LIMIT) as pool:
        full = await pool.allocate_async(LIMIT)
        found = await measure(pool, [nbytes for nbytes, _ in draw_plan(count)])
        full.free()
        return found


async def _cancel(pool: AsyncMemoryPool, sizes: list[int]) -> tuple[float, ...]:
    before = used_memory()
    started = time.perf_counter()
    queue: Queue = [pool.allocate_async(nbytes) for nbytes in sizes]  # type: ignore[misc]  # none of them is a hit
    queued = time.perf_counter() - started
    each = (used_memory() - before) / len(sizes)
    await asyncio.sleep(0)
    random.Random(1).shuffle(queue)  # noqa: S311  # no secret
    started = time.perf_counter()
    for request in queue:
        request.cancel()
    return queued, each, time.perf_counter() - started


async def _expire(pool: AsyncMemoryPool, sizes: list[int]) -> tuple[float, ...]:
    loop = asyncio.get_running_loop()
    until = loop.time() + MARGIN + 2 * QUEUED * len(sizes) / REQUESTS
    queue: Queue = [
        pool.allocate_async(nbytes, timeout=until - loop.time())  # type: ignore[misc]  # none of them is a hit
        for nbytes in sizes
    ]
    await asyncio.sleep(until - loop.time())
    while not all(request.done() for request in queue):  # noqa: ASYNC110  # nothing signals the last one
        await asyncio.sleep(0)
    return (loop.time() - until,)


_STATM: Final = Path("/proc/self/statm")


def used_memory() -> int:
    """Return the bytes of the process that are in memory, those of the compiled core among them."""
    import resource

    if _STATM.exists():
        return int(_STATM.read_text(encoding="ascii").split()[1]) * resource.getpagesize()
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
