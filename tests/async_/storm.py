"""One storm over a real loop and real threads: tasks and threads that do to a pool whatever may be done to it, at once.

What each of them does is drawn from the storm's seed; how they meet is up to the loop and the machine. Each comes to an
end by itself: a task that holds memory while it waits for more does so as an owner, or for a bounded time.
"""

import contextlib
import random
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Final

import anyio
import anyio.lowlevel

from asyncmem import (
    AsyncMemoryPool,
    Batch,
    Budget,
    Buffer,
    DeadlockError,
    OutOfMemoryError,
    PoolClosed,
    PoolTimeout,
    RequestCancelled,
    Spillable,
)
from asyncmem.core import Request
from asyncmem.devices import Latencies, Simulated
from tests.conservation import refillable, whole

KIB: Final = 1 << 10
MIB: Final = 1 << 20
LIMIT: Final = 4 * MIB
LOWEST: Final = 2 * MIB
"""No resize goes below this; nor below half of a budget's limit."""
TASKS: Final = 48
THREADS: Final = 12
STEPS: Final = 6
PATIENCE: Final = 90.0
"""Seconds for a storm, on however busy a machine; usually it takes a tenth of one."""

Share = AsyncMemoryPool | Budget
Held = Buffer | Batch


class Storm:
    """What happens in one pool."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.draw = draw = random.Random(seed)
        self.page = 4096
        device = Simulated(2 * LIMIT, latencies=Latencies.zero(), page=self.page)
        self.pool = AsyncMemoryPool(
            device, limit=LIMIT, segment_size=draw.choice([LIMIT, MIB, 256 * KIB]),
            segments=draw.choice(["auto", "auto", "paged", "direct"]), bypass=draw.choice([0, 0.5, 2]),
            small_limit=draw.choice([4 * KIB, 64 * KIB]), spill_limit=2 * LIMIT, stall_after=None,
        )  # fmt: skip
        self.budgets: list[Budget] = []
        self.limits: list[int] = []
        self.requests: list[Request[Held]] = []
        self.ends: Counter[str] = Counter()
        self.over = 0
        self.errors: list[BaseException] = []
        self.passed_on: list[Buffer] = []  # what a task has, a thread frees
        self.threads: list[threading.Thread] = []

    async def run(self) -> None:
        """Let it blow out, and look at what it leaves."""
        async with self.pool:
            self.make_budgets()
            streams = [self.pool.device.create_stream(str(number)) for number in range(2)]
            self.streams: list[object] = [None, None, *streams]
            for number in range(THREADS):
                self.threads.append(threading.Thread(target=self.play_thread, args=(number,), daemon=True))
            self.pool._opened._due = float("inf")  # no tick makes good what an event should have done
            with anyio.move_on_after(PATIENCE) as scope:
                async with anyio.create_task_group() as group:
                    for number in range(TASKS):
                        group.start_soon(self.play, number)
                    group.start_soon(self.meddle)
                    for thread in self.threads:
                        thread.start()
                for thread in self.threads:
                    await anyio.to_thread.run_sync(thread.join, abandon_on_cancel=True)
            if scope.cancelled_caught:
                raise AssertionError(
                    f"storm {self.seed}: {TASKS + THREADS - self.over} never came to an end: {self.picture()}"
                )
            if self.errors:
                raise AssertionError(f"storm {self.seed}: {self.errors}") from self.errors[0]
            self.requests.clear()
            self.passed_on.clear()
            await self.look()

    async def look(self) -> None:
        """All is as it was: nothing is held, and every share can be had as a whole."""
        self.pool.resize(limit=LIMIT)
        whole(self.pool)
        for budget, limit in zip(self.budgets, self.limits, strict=True):
            budget.resize(limit=limit)
            await refillable(budget, limit)
        await refillable(self.pool, LIMIT)
        for budget in reversed(self.budgets):
            budget.close()
        whole(self.pool)

    def picture(self) -> str:
        stats = self.pool.stats()
        gauges = self.pool._opened.core.scheduler.gauges()
        return f"{self.ends}\n{stats}\n{gauges}\n" + "\n".join(map(str, self.pool.waiters()))

    def make_budgets(self) -> None:
        """Four of them, one in the other."""
        above: Share = self.pool
        for depth, limit in enumerate([LIMIT, 3 * MIB, 2 * MIB, MIB]):
            budget = above.budget(f"budget-{depth}", limit=limit)
            self.budgets.append(budget)
            self.limits.append(limit)
            above = budget

    # -- what may be asked for -----------------------------------------------------------------------------------------

    def share(self, draw: random.Random) -> tuple[Share, int]:
        """Return where to ask, and the most that can always be had there."""
        number = draw.randrange(-2, 4)
        if number < 0:
            return self.pool, LOWEST
        return self.budgets[number], min(LOWEST, *(limit // 2 for limit in self.limits[: number + 1]))

    @staticmethod
    def size(draw: random.Random, most: int) -> int:
        if draw.random() < 0.3:
            return most // draw.randrange(1, 4)
        return int(2 ** draw.uniform(0, 18)) % most + 1

    async def pause(self, draw: random.Random) -> None:
        if draw.random() < 0.5:
            await anyio.lowlevel.checkpoint()
        else:
            await anyio.sleep(draw.random() * 0.001)

    # -- tasks ---------------------------------------------------------------------------------------------------------

    async def play(self, number: int) -> None:
        draw = random.Random(f"{self.seed} {number}")
        steps: list[Callable[[random.Random], Awaitable[None]]] = [
            self.plain, self.plain, self.batch, self.lease, self.spill, self.cancel, self.time_out, self.leave,
            self.drop, self.entered,
        ]  # fmt: skip
        if number < 4:
            steps.append(self.nest)
        for _ in range(STEPS):
            await draw.choice(steps)(draw)
        self.over += 1

    def ask(self, draw: random.Random, share: Share, nbytes: int, **more: object) -> Request[Buffer]:
        stream = draw.choice(self.streams)
        request = share.allocate_async(nbytes, stream=stream, priority=draw.choice([0, 0, 1]), **more)  # type: ignore[arg-type]  # whatever there is
        assert isinstance(request, Awaitable)
        return request  # type: ignore[return-value]  # or a granted one, which is as good here

    async def plain(self, draw: random.Random) -> None:
        share, most = self.share(draw)
        buffer = await self.ask(draw, share, self.size(draw, most))
        await self.pause(draw)
        if draw.random() < 0.3:
            self.passed_on.append(buffer)
        else:
            buffer.free(draw.choice(self.streams))

    async def entered(self, draw: random.Random) -> None:
        share, most = self.share(draw)
        async with self.ask(draw, share, self.size(draw, most)):
            await self.pause(draw)

    async def batch(self, draw: random.Random) -> None:
        share, most = self.share(draw)
        sizes = [self.size(draw, most // 4) for _ in range(draw.randrange(1, 4))]
        batch = await share.allocate_batch(sizes)
        await self.pause(draw)
        batch.free()

    async def lease(self, draw: random.Random) -> None:
        """A range, with a budget and buffers inside; one of them outlives it."""
        share, most = self.share(draw)
        nbytes = self.size(draw, most)
        late: Buffer | None = None
        async with share.lease(nbytes) as lease:
            inner = lease.budget("inner", limit=nbytes)
            with contextlib.suppress(OutOfMemoryError):
                late = lease.allocate(nbytes // 4 + 1)
                buffer = await inner.allocate_async(nbytes // 4 + 1)
                await self.pause(draw)
                buffer.free()
        await self.pause(draw)
        if late is not None:
            late.free()

    async def spill(self, draw: random.Random) -> None:
        """Memory that may move while it is not used. A task waits a while for its use, and holds nothing else."""
        share, most = self.share(draw)
        held: Spillable = share.spillable(await share.allocate_async(self.size(draw, most)))
        for _ in range(2):
            await self.pause(draw)
            async with held:
                await self.pause(draw)
        held.free()

    async def cancel(self, draw: random.Random) -> None:
        """A request that somebody else may end."""
        share, most = self.share(draw)
        request = self.ask(draw, share, self.size(draw, most))
        if isinstance(request, Request):
            self.requests.append(request)
        try:
            buffer = await request
        except RequestCancelled:
            self.ends["cancelled"] += 1
        else:
            buffer.free()

    async def time_out(self, draw: random.Random) -> None:
        """Holds something while it waits for more, for a while."""
        share, most = self.share(draw)
        kept = await self.ask(draw, share, self.size(draw, most))
        try:
            buffer = await self.ask(draw, share, self.size(draw, most), timeout=draw.random() * 0.005)
        except PoolTimeout:
            self.ends["timeout"] += 1
        else:
            buffer.free()
        kept.free()

    async def leave(self, draw: random.Random) -> None:
        """A task that is cancelled in the midst of it."""
        with anyio.move_on_after(draw.random() * 0.002) as scope:
            await draw.choice([self.plain, self.batch, self.lease, self.entered])(draw)
        self.ends["left"] += scope.cancelled_caught

    async def drop(self, draw: random.Random) -> None:
        """A request that nobody awaits."""
        share, most = self.share(draw)
        self.ask(draw, share, self.size(draw, most))

    async def nest(self, draw: random.Random) -> None:
        """Holds some as an owner while it waits for more: what deadlocks are made of."""
        try:
            async with self.ask(draw, self.pool, MIB):
                await self.pause(draw)
                async with self.ask(draw, self.budgets[0], MIB):
                    await self.pause(draw)
        except DeadlockError:
            self.ends["deadlock"] += 1

    # -- threads -------------------------------------------------------------------------------------------------------

    def play_thread(self, number: int) -> None:
        draw = random.Random(f"{self.seed} thread {number}")
        try:
            for _ in range(2 * STEPS):
                self.step_thread(draw)
                time.sleep(draw.random() * 0.001)
        except BaseException as error:  # noqa: BLE001  # the storm fails with it
            self.errors.append(error)
        self.over += 1

    def step_thread(self, draw: random.Random) -> None:
        share, most = self.share(draw)
        match draw.randrange(6):
            case 0:
                self.free_one()
            case 1:
                with contextlib.suppress(IndexError):
                    self.ends["ended"] += self.requests.pop().cancel()
            case 2:
                buffer = share.try_allocate(self.size(draw, most))
                self.ends["tried"] += buffer is not None
            case 3:
                try:
                    share.allocate(self.size(draw, most)).free()
                except OutOfMemoryError:
                    self.ends["refused"] += 1
            case 4 | 5:
                try:
                    share.allocate(self.size(draw, most), timeout=draw.random() * 0.01).free()
                except PoolTimeout:
                    self.ends["thread timeout"] += 1

    def free_one(self) -> None:
        with contextlib.suppress(IndexError):
            self.passed_on.pop().free()

    # -- what is changed meanwhile -------------------------------------------------------------------------------------

    async def meddle(self) -> None:
        draw = random.Random(f"{self.seed} meddler")
        while self.over < TASKS + THREADS:
            await anyio.sleep(draw.random() * 0.004)
            for _ in range((len(self.passed_on) + 1) // 2):  # the rest is left to threads, as long as they last
                self.free_one()
            match draw.randrange(7):
                case 0 | 1:
                    self.pool.resize(limit=draw.choice([LIMIT, LIMIT, LOWEST, LOWEST + MIB]))
                case 2 | 3:
                    number = draw.randrange(len(self.budgets))
                    limit = self.limits[number]
                    self.budgets[number].resize(limit=draw.choice([limit, limit, limit // 2]))
                case 4:
                    await self.pool.trim()
                case 5:
                    self.pool.empty_cache()
                case 6:
                    self.pool.check()


async def close_in_the_midst(seed: int) -> None:
    """A pool that is closed while tasks and threads use it: all come to an end, and its memory goes back."""
    storm = Storm(seed)
    device = storm.pool.device

    async def endure(number: int) -> None:
        with contextlib.suppress(PoolClosed):
            await storm.play(number)

    with anyio.fail_after(PATIENCE):
        async with anyio.create_task_group() as group, storm.pool:
            storm.make_budgets()
            storm.streams = [None]
            for number in range(4, TASKS):
                group.start_soon(endure, number)
            await anyio.sleep(storm.draw.random() * 0.02)
    storm.passed_on.clear()
    storm.requests.clear()
    with anyio.fail_after(PATIENCE):
        while device.memory().free < device.memory().total:  # noqa: ASYNC110 - the device tells nobody
            await anyio.sleep(0.001)
