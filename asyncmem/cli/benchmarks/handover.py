"""What does it cost that a free wakes a waiter, which resumes with the memory, when few and when many are waiting?

A relay: every worker waits for the one buffer that moves, frees it as soon as it has it, and queues again. The floor is
the same relay with a token in an `asyncio.Queue`. A queue lets whoever asks first have what was just put, woken getter
or not, so nobody waits at the queue that it puts the token into; otherwise one would take back, without a hand-over and
without an iteration of the loop, the token that it has just passed on.
"""

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Final, Generic, TypeVar

from asyncmem import AsyncMemoryPool, Buffer
from asyncmem.cli.benchmarks.measure import Effort, Loop, interleave
from asyncmem.cli.benchmarks.result import Row, compare, worst_of

BOUND: Final = 1.3
QUESTION: Final = "a free wakes a waiter that resumes, against an asyncio.Queue hand-over, per hand-over"
WAITING: Final = (1, 10_000)
SIZE: Final = 1 << 20
RESIDENTS: Final = 31
"""Buffers that stay where they are, as in any pool that is full: one free among them changes no level of pressure."""

Baton = TypeVar("Baton")


class Relay(Generic[Baton]):
    """Passes one baton among workers so many times, then takes it back; the workers stay in their queue between."""

    def __init__(self, baton: Baton, release: Callable[[Baton], None]) -> None:
        self.baton = baton
        self.release = release
        self.left = 0
        self.ended = 0
        self.back: asyncio.Future[Baton] = asyncio.get_running_loop().create_future()

    async def run(self, turns: int) -> int:
        """Let the baton change hands `turns` times and answer the nanoseconds from the first to the last."""
        self.left = turns
        self.back = asyncio.get_running_loop().create_future()
        started = time.perf_counter_ns()
        self.release(self.baton)
        del self.baton
        self.baton = await self.back
        return self.ended - started

    def passed(self, baton: Baton) -> None:
        """Count one worker's turn and pass the baton on."""
        self.left -= 1
        if self.left:
            self.release(baton)
        else:
            self.ended = time.perf_counter_ns()
            self.back.set_result(baton)


def measure(effort: Effort) -> Row:
    """Time both relays with one and with ten thousand waiting."""
    cases = {str(waiting): effort.run(_measure(waiting, effort)) for waiting in WAITING}
    return worst_of(QUESTION, cases)


async def _measure(waiting: int, effort: Effort) -> Row:
    async with pool_relay(waiting) as ours, queue_relay(waiting) as floor:
        timings = await interleave([ours, floor], effort, per_turn=1)
    return compare(QUESTION, BOUND, *timings, waiting=waiting)


@contextlib.asynccontextmanager
async def pool_relay(waiting: int) -> AsyncIterator[Loop]:
    """Let `waiting` workers and one more wait for the one buffer of a full pool that changes hands."""
    limit = SIZE * (RESIDENTS + 1)
    async with AsyncMemoryPool("host", limit=limit, segment_size=limit) as pool:
        residents = [await pool.allocate_async(SIZE) for _ in range(RESIDENTS)]
        relay = Relay(await pool.allocate_async(SIZE), Buffer.free)

        async def worker() -> None:
            while True:
                relay.passed(await pool.allocate_async(SIZE))

        async with workers(waiting + 1, worker):
            yield relay.run
            relay.baton.free()
        residents.clear()


@contextlib.asynccontextmanager
async def queue_relay(waiting: int) -> AsyncIterator[Loop]:
    """Let `waiting` workers and one more wait for one token, half of them at each of two queues it goes to in turn."""
    lanes: tuple[asyncio.Queue[str], ...] = (asyncio.Queue(), asyncio.Queue())
    order = itertools.cycle(lanes)
    places = itertools.cycle(lanes)

    def release(token: str) -> None:
        next(order).put_nowait(token)

    relay = Relay("token", release)

    async def worker() -> None:
        lane = next(places)
        while True:
            relay.passed(await lane.get())

    async with workers(waiting + 1, worker):
        yield relay.run


@contextlib.asynccontextmanager
async def workers(count: int, work: Callable[[], Coroutine[object, object, None]]) -> AsyncIterator[None]:
    """Start so many tasks, let each reach its first wait, and cancel them in the end."""
    tasks = [asyncio.create_task(work()) for _ in range(count)]
    await asyncio.sleep(0)
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
