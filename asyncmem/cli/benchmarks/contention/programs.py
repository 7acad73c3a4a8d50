"""The programs: what a task does with the pool, and its like with a semaphore."""

import asyncio
import itertools
import math
import random
import statistics
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import anyio

from asyncmem import AsyncMemoryPool, Budget
from asyncmem.cli.benchmarks.measure import Effort, collector_off, summary
from asyncmem.cli.benchmarks.result import Timing
from asyncmem.pool.loops import EventLoop, Timer

LIMIT: Final = 16 << 20
SMALLEST: Final = 512
LARGEST: Final = 4 << 20
ONE_SIZE: Final = 1 << 20
PAUSE: Final = 0.0005
PERMITS: Final = 16
STEPS: Final = 20_000
EACH: Final = 3
"""Steps of each task at least."""
FEWEST_STEPS: Final = 200
MINUTE: Final = 60
PRIORITIES: Final = 3
BUDGETS: Final = 100
DEEP: Final = 3
MOST_REPEATS: Final = 3

Step = Callable[[int, float], Awaitable[object]]
"""One step of a task: how many bytes, and how long they are held."""
Work = Callable[[AsyncMemoryPool, int], Step]
"""Makes the steps of a task by its number."""


@dataclass(frozen=True)
class Program:
    """What is measured.

    Attributes:
        name: What it is called.
        work: Makes a task's steps.
        size: Bytes of each step; 0 for random ones.
        backend: The kind of loop: asyncio as the effort says, uvloop, or trio.
        needs: A package that may not be there.
        threads: How many threads there are in place of tasks.
    """

    name: str
    work: Work | None = None
    size: int = 0
    backend: str = "asyncio"
    needs: str | None = None
    threads: int = 0

    @property
    def bounded(self) -> bool:
        """Whether it is held against the bounds, which are about asyncio."""
        return self.backend == "asyncio" and not self.threads


def measure_program(program: Program, count: int, effort: Effort) -> tuple[Timing, Timing, float]:
    """Time both sides in turn; return nanoseconds a step of each, and the share of ours that went into proofs."""
    steps = max(round(STEPS * effort.share), EACH * count, FEWEST_STEPS)
    ours, floor, proofs = [], [], []
    with collector_off():
        for _ in range(max(1, min(MOST_REPEATS, effort.repeats // 5))):
            with proof_seconds() as spent:
                ours.append(_run(program, count, steps, effort, semaphore=False))
            proofs.append(sum(spent) / (ours[-1] * steps / 1e9))
            floor.append(_run(program, count, steps, effort, semaphore=True))
    return summary(ours), summary(floor), statistics.median(proofs)


def _run(program: Program, count: int, steps: int, effort: Effort, *, semaphore: bool) -> float:
    if program.threads:
        return _threads(count, steps, semaphore=semaphore)
    if program.backend == "trio":
        import trio

        found: float = trio.run(_tasks, program, count, steps, trio.Semaphore if semaphore else None)
        return found
    factory = effort.loop_factory
    if program.backend == "uvloop":
        import uvloop

        factory = uvloop.Loop
    with asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(_tasks(program, count, steps, asyncio.Semaphore if semaphore else None))


async def _tasks(program: Program, count: int, steps: int, semaphore: Callable[[int], Any] | None) -> float:
    """Run so many tasks until all steps are made; return nanoseconds a step."""
    plan = draw_plan(steps, program.size)
    work = program.work
    async with AsyncMemoryPool("host", limit=LIMIT) as pool:
        if semaphore is not None:
            make = _through(semaphore(PERMITS))
        else:
            assert work is not None
            make = work

        async def task(number: int) -> None:
            step = make(pool, number)
            for nbytes, pause in plan:
                await step(nbytes, pause)

        return await _all(task, count, program.backend) / steps


async def _all(task: Callable[[int], Coroutine[Any, Any, None]], count: int, backend: str) -> int:
    started = time.perf_counter_ns()
    if backend == "trio":
        async with anyio.create_task_group() as group:
            for number in range(count):
                group.start_soon(task, number)
    else:
        await asyncio.gather(*[task(number) for number in range(count)])
    return time.perf_counter_ns() - started


def _through(semaphore: Any) -> Work:  # noqa: ANN401  # asyncio's or trio's
    def make(pool: AsyncMemoryPool, number: int) -> Step:  # noqa: ARG001
        sleep = _sleep()

        async def step(nbytes: int, pause: float) -> None:  # noqa: ARG001
            async with semaphore:
                await sleep(pause)

        return step

    return make


def _sleep() -> Callable[[float], Awaitable[object]]:
    if asyncio._get_running_loop() is not None:
        return asyncio.sleep
    import trio

    return trio.sleep


def draw_plan(steps: int, size: int) -> Iterator[tuple[int, float]]:
    """Draw the bytes and the pause of each step: half of them sleep, and sizes are even over their logarithm."""
    draw = random.Random(1)  # noqa: S311  # no secret
    least, most = math.log(SMALLEST), math.log(LARGEST)
    plan = [(size or int(math.exp(draw.uniform(least, most))), draw.choice((0.0, PAUSE))) for _ in range(steps)]
    return iter(plan)


def _threads(count: int, steps: int, *, semaphore: bool) -> float:
    """Run so many threads until all steps are made; return nanoseconds a step."""
    plan = list(draw_plan(steps, 0))
    numbers = itertools.count()
    gate = threading.Semaphore(PERMITS)
    pool = AsyncMemoryPool("host", limit=LIMIT)

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

    with pool:
        threads = [threading.Thread(target=work) for _ in range(count)]
        started = time.perf_counter_ns()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return (time.perf_counter_ns() - started) / steps


@contextmanager
def proof_seconds() -> Iterator[list[float]]:
    """Note how long each look for a deadlock takes: a callback of the loop, which is wrapped as it is set."""
    spent: list[float] = []
    plain = EventLoop.call_at

    def noted(callback: Callable[[], object]) -> Callable[[], object]:
        if getattr(callback, "__name__", "") != "look_for_deadlock":
            return callback

        def look() -> None:
            started = time.perf_counter()
            callback()
            spent.append(time.perf_counter() - started)

        return look

    def call_at(loop: EventLoop, when: float, callback: Callable[[], object]) -> Timer:
        return plain(loop, when, noted(callback))

    EventLoop.call_at = call_at  # type: ignore[assignment, method-assign]
    try:
        yield spent
    finally:
        EventLoop.call_at = plain  # type: ignore[method-assign]


# -- what a task does --------------------------------------------------------------------------------------------------


def _plain(pool: AsyncMemoryPool, number: int) -> Step:  # noqa: ARG001
    sleep = _sleep()

    async def step(nbytes: int, pause: float) -> None:
        buffer = await pool.allocate_async(nbytes)
        await sleep(pause)
        buffer.free()

    return step


def _entered(pool: AsyncMemoryPool, number: int) -> Step:  # noqa: ARG001
    async def step(nbytes: int, pause: float) -> None:
        async with pool.allocate_async(nbytes):
            await asyncio.sleep(pause)

    return step


def _timed(pool: AsyncMemoryPool, number: int) -> Step:  # noqa: ARG001
    async def step(nbytes: int, pause: float) -> None:
        buffer = await pool.allocate_async(nbytes, timeout=MINUTE)
        await asyncio.sleep(pause)
        buffer.free()

    return step


def _in_batches(pool: AsyncMemoryPool, number: int) -> Step:  # noqa: ARG001
    async def step(nbytes: int, pause: float) -> None:
        part = nbytes // 3
        batch = await pool.allocate_batch([part, part, part])
        await asyncio.sleep(pause)
        batch.free()

    return step


def _with_priority(pool: AsyncMemoryPool, number: int) -> Step:
    priority = number % PRIORITIES

    async def step(nbytes: int, pause: float) -> None:
        buffer = await pool.allocate_async(nbytes, priority=priority)
        await asyncio.sleep(pause)
        buffer.free()

    return step


def _in_budgets(pool: AsyncMemoryPool, number: int) -> Step:
    budget = _budgets(pool)[DEEP * (number % (BUDGETS // DEEP)) + DEEP - 1]

    async def step(nbytes: int, pause: float) -> None:
        buffer = await budget.allocate_async(nbytes)
        await asyncio.sleep(pause)
        buffer.free()

    return step


def _budgets(pool: AsyncMemoryPool) -> list[Budget]:
    """Return the pool's budgets, three deep; makes them for the first task."""
    budgets = [one for one in pool.inside if isinstance(one, Budget)]
    above: AsyncMemoryPool | Budget = pool
    for number in range(len(budgets), BUDGETS):
        above = (above if number % DEEP else pool).budget(str(number), limit=LIMIT)
        budgets.append(above)
    return budgets


def _in_leases(pool: AsyncMemoryPool, number: int) -> Step:  # noqa: ARG001
    async def step(nbytes: int, pause: float) -> None:
        async with pool.lease(nbytes) as lease:
            buffer = await lease.allocate_async(nbytes)
            await asyncio.sleep(pause)
            buffer.free()

    return step


PROGRAMS: Final = (
    Program("one size", _plain, size=ONE_SIZE),
    Program("mixed sizes", _plain),
    Program("async with", _entered),
    Program("timeouts", _timed),
    Program("batches of 3", _in_batches),
    Program("3 priorities", _with_priority),
    Program("100 budgets", _in_budgets),
    Program("leases", _in_leases),
    Program("trio", _plain, backend="trio", needs="trio"),
    Program("uvloop", _plain, backend="uvloop", needs="uvloop"),
    Program("threads", threads=8),
)
