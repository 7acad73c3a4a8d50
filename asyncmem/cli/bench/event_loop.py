"""How long the pool holds the event loop: while it grows, and when a free wakes a waiting request."""

import asyncio
import contextlib
import itertools
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable
from contextvars import Context
from functools import partial
from typing import TYPE_CHECKING, Final, Generic, TypeVar, TypeVarTuple

from asyncmem import AsyncMemoryPool, Buffer
from asyncmem.cli.bench.timing import (
    Effort,
    Row,
    Side,
    Timing,
    compare,
    percentile,
    random_plan,
    summary,
    time_sides,
    worst_of,
)
from asyncmem.devices import Latencies, Simulated

if TYPE_CHECKING:
    from _typeshed import FileDescriptorLike

Ts = TypeVarTuple("Ts")
Result = TypeVar("Result")


class WatchedLoop(asyncio.SelectorEventLoop):
    """A loop that times what it runs: steps of tasks, wake-ups from other threads, readers.

    Only what passes through `call_soon`, `call_soon_threadsafe` and `add_reader` is seen, which is all that waiting
    for memory uses; timers are not.
    """

    def __init__(self) -> None:
        super().__init__()
        self._held_ns = 0
        self._started = 0

    def held_ns(self) -> int:
        """Return the nanoseconds that callbacks have held the loop so far, the present one up to now included."""
        return self._held_ns + (time.perf_counter_ns() - self._started)

    def call_soon(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        """Schedule a callback, timed."""
        return super().call_soon(self._timed, callback, args, context=context)

    def call_soon_threadsafe(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        """Schedule a callback from another thread, timed."""
        return super().call_soon_threadsafe(self._timed, callback, args, context=context)

    def add_reader(self, fd: "FileDescriptorLike", callback: Callable[[*Ts], object], *args: *Ts) -> None:
        """Watch a file descriptor; its callback is timed."""
        super().add_reader(fd, self._timed, callback, args)

    def _timed(self, callback: Callable[[*Ts], object], args: tuple[*Ts]) -> None:
        self._started = time.perf_counter_ns()
        try:
            callback(*args)
        finally:
            self._held_ns += time.perf_counter_ns() - self._started


def run_watched(main: Callable[[WatchedLoop], Coroutine[object, object, Result]]) -> Result:
    """Run a coroutine on a fresh watched loop, which it is given."""
    loop = WatchedLoop()
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        return runner.run(main(loop))


# -- stall: growth under slow driver calls -----------------------------------------------------------------------------

STALL_BOUND: Final = 1.0
ALLOWED_NS: Final = 100_000
DRIVER_SECONDS: Final = 0.001
GROWING: Final = 400
GROWING_SIZES: Final = (64 << 10, 128 << 20)
RUNS: Final = 5


def stall(effort: Effort) -> Row:
    """Time how long one of 400 growing allocations holds the loop under driver calls of 1 ms: p99 against 100 µs.

    The simulated device's driver calls really take a millisecond each, and it notes which thread made them. Nothing
    else runs on the loop, so all the time that it is held from one allocation to the next belongs to that allocation.
    The best of five runs counts; a driver call on the loop's thread in any of them fails the row.
    """
    runs = [run_watched(_grow) for _ in range(max(1, round(RUNS * effort.share)))]
    on_loop = sum(on_loop for _, _, on_loop in runs)
    return compare(
        STALL_BOUND,
        summary([p99 for p99, _, _ in runs]),
        Timing(ns=ALLOWED_NS, median_ns=ALLOWED_NS),
        broken=f"{on_loop} driver calls on the loop's thread" if on_loop else "",
        driver_calls=sum(calls for _, calls, _ in runs) // len(runs),
        driver_calls_on_loop_thread=on_loop,
        executor_ns=round(run_watched(_executor), 2),
    )


async def _grow(loop: WatchedLoop) -> tuple[int, int, int]:
    """Return the p99 of the hold in nanoseconds, the driver calls, and those of them on this thread."""
    device = Simulated(clock="wall", latencies=Latencies.blocking(DRIVER_SECONDS))
    async with AsyncMemoryPool(device, limit="64 GiB") as pool:
        before, kept, held = len(device.calls), [], []
        for _, size in random_plan(GROWING, 1, *GROWING_SIZES):
            start = loop.held_ns()
            kept.append(await pool.allocate_async(size))
            held.append(loop.held_ns() - start)
        calls = list(device.calls)[before:]
        kept.clear()
    await asyncio.to_thread(device.close)
    on_loop = sum(call.thread == threading.get_ident() for call in calls)
    return percentile(held, 0.99), len(calls), on_loop


async def _executor(loop: WatchedLoop) -> float:
    """Return the same figure for asyncio's own way to wait for a blocking call: the cost of a hand-over to a thread."""
    held = []
    for _ in range(GROWING):
        start = loop.held_ns()
        await loop.run_in_executor(None, time.sleep, DRIVER_SECONDS)
        held.append(loop.held_ns() - start)
    return percentile(held, 0.99)


# -- handover: a free wakes a waiting request --------------------------------------------------------------------------

HANDOVER_BOUND: Final = 1.3
WAITING: Final = (1, 10_000)
SIZE: Final = 1 << 20
RESIDENTS: Final = 31
"""Buffers that stay where they are, as in any pool that is full: one free among them changes no level of pressure."""

Baton = TypeVar("Baton")


class Relay(Generic[Baton]):
    """Passes one baton among workers so many times, then takes it back; the workers stay in their queue between.

    Args:
        baton: What changes hands.
        release: Lets the next worker have it.
    """

    def __init__(self, baton: Baton, release: Callable[[Baton], object]) -> None:
        self.baton = baton
        self._release = release
        self._left = self._ended = 0
        self._back: asyncio.Future[Baton]

    async def run(self, turns: int) -> int:
        """Let the baton change hands `turns` times and return the nanoseconds from the first to the last."""
        self._left = turns
        self._back = asyncio.get_running_loop().create_future()
        started = time.perf_counter_ns()
        self._release(self.baton)
        del self.baton
        self.baton = await self._back
        return self._ended - started

    async def work(self, take: Callable[[], Awaitable[Baton]]) -> None:
        """Wait for the baton, count the turn and pass it on, again and again."""
        while True:
            baton = await take()
            self._left -= 1
            if self._left:
                self._release(baton)
            else:
                self._ended = time.perf_counter_ns()
                self._back.set_result(baton)
            del baton

    @contextlib.asynccontextmanager
    async def side(self, takes: Iterable[Callable[[], Awaitable[Baton]]]) -> AsyncIterator[Side]:
        """Start a worker for each way to take the baton, and let each reach its first wait; cancel them in the end."""
        tasks = [asyncio.create_task(self.work(take)) for take in takes]
        await asyncio.sleep(0)
        try:
            yield Side(self.run, 1)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def handover(effort: Effort) -> Row:
    """Time a free that wakes a waiter that resumes, with 1 and 10,000 waiting, against an `asyncio.Queue` hand-over.

    A relay: every worker waits for the one buffer that moves, frees it as soon as it has it, and queues again. The
    floor is the same relay with a token in an `asyncio.Queue`. A queue gives what was just put to the first task that
    asks, woken getter or not, so no worker waits at the queue that it puts the token into: it would take back, without
    a hand-over and without an iteration of the loop, the token that it has just passed on.
    """
    return worst_of({str(waiting): effort.run(_handover(waiting, effort)) for waiting in WAITING})


async def _handover(waiting: int, effort: Effort) -> Row:
    async with pool_relay(waiting + 1) as ours, queue_relay(waiting + 1) as floor:
        return compare(HANDOVER_BOUND, *await time_sides([ours, floor], effort), waiting=waiting)


@contextlib.asynccontextmanager
async def pool_relay(workers: int) -> AsyncIterator[Side]:
    """Let workers wait for the one buffer of a full pool that changes hands."""
    limit = SIZE * (RESIDENTS + 1)
    async with AsyncMemoryPool("host", limit=limit, segment_size=limit) as pool:
        residents = [await pool.allocate_async(SIZE) for _ in range(RESIDENTS)]
        relay = Relay(await pool.allocate_async(SIZE), Buffer.free)
        async with relay.side([partial(pool.allocate_async, SIZE)] * workers) as side:
            yield side
            relay.baton.free()
        residents.clear()


@contextlib.asynccontextmanager
async def queue_relay(workers: int) -> AsyncIterator[Side]:
    """Let workers wait for one token, half of them at each of two queues it goes to in turn."""
    lanes: tuple[asyncio.Queue[str], ...] = (asyncio.Queue(), asyncio.Queue())
    order = itertools.cycle(lanes)
    relay = Relay("token", lambda token: next(order).put_nowait(token))
    async with relay.side([lane.get for lane, _ in zip(itertools.cycle(lanes), range(workers))]) as side:
        yield side
