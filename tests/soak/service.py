"""A day of a service on the simulated device in virtual time, while every call of the driver fails at random.

    python tests/soak/service.py                                    # what `tox -e soak` runs: ten minutes
    python tests/soak/service.py --minutes 60 --seed 7              # an hour of it
    python tests/soak/service.py --device cuda:0 --seconds 1800     # a real card, in real time, beside torch and CuPy

Requests come at ten thousand a second, in a burst at the beginning of each minute; then the clock moves on to the next
minute. Meanwhile budgets come and go, limits change, another process takes memory of the device, tasks are cancelled,
deadlines pass, threads allocate, clocks jump and event loops are closed under their tasks. It prints a line for each
virtual hour, and ends with an error that names the seed where an invariant is broken, a request never ends, memory or
descriptors grow, or other bytes went out than came in.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import itertools
import math
import random
import resource
import sys
import threading
import time
import warnings
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from asyncmem import (
    AsyncmemError,
    AsyncMemoryPool,
    Budget,
    Buffer,
    DeviceError,
    OutOfMemoryError,
)
from asyncmem.devices import Device, Latencies, Simulated, Stream
from asyncmem.devices.simulated.calls import CallLog
from asyncmem.facts import OutOfMemoryFacts
from asyncmem.pool.holders import shortage
from asyncmem.testing import StepLoop, SteppedPool
from asyncmem.testing.stepworker import StepWorker
from tests.conservation import whole

KIB: Final = 1 << 10
MIB: Final = 1 << 20
LIMIT: Final = 64 * MIB
LOWEST: Final = 24 * MIB
LARGEST: Final = 8 * MIB
BURST: Final = 1000
"""Requests a minute: a day has 1.44 million of them, which take ten minutes. All 864 million would take four days."""
TICK: Final = 0.25
"""Seconds between the looks of a pool's worker, which in virtual time has no thread to take them."""
ROOM: Final = 8 * MIB
"""What the process may grow by after it has warmed up: the collector and the C library keep some for later."""

RATES: Final = {
    "allocate_segment": 0.05, "free_segment": 0.03, "create": 0.02, "map": 0.01, "unmap": 0.01, "set_access": 0.01,
    "release": 0.01, "memory": 0.01, "record": 0.004, "record_all": 0.01, "wait": 0.002, "query": 0.001, "block": 0.01,
    "fill": 0.001, "copy": 0.005, "copy_in": 0.005, "copy_out": 0.005, "create_stream": 0.2,
}  # fmt: skip
"""How often each call of the simulated driver fails."""
SHORT: Final = frozenset({"allocate_segment", "create", "map", "reserve"})
"""Those that may be out of memory, too."""


class Faults(CallLog):
    """The calls of a device, of which each fails at its own rate."""

    def __init__(self, device: Simulated, draw: random.Random) -> None:
        super().__init__(device.name, device.clock, Latencies.zero())
        self.recent = type(self.recent)(maxlen=1)  # a day's last calls are nothing to keep
        self.on = True
        self.made: Counter[str] = Counter()
        self._draw = draw

    def _due_fault(self, name: str) -> Exception | None:
        if not self.on or self._draw.random() >= RATES.get(name, 0.0):
            return None
        self.made[name] += 1
        if name in SHORT and self._draw.random() < 0.5:
            return OutOfMemoryError(OutOfMemoryFacts(asked=MIB, device="simulated:0"))
        return DeviceError(name, code=999, code_name="SIMULATED_FAULT", device="simulated:0")


class Faulty(Simulated):
    """A simulated device whose calls fail, and that adds up what it gives and takes back."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__(LIMIT + 16 * MIB, latencies=Latencies.zero(), page=64 * KIB)
        self.log = self._paging.log = self.faults = Faults(self, draw)


class Loop(StepLoop):
    """Virtual time that may also jump, with what is due on the way."""

    def jump(self, seconds: float) -> None:
        """Move on, as the clock of a machine that was asleep."""
        self._now += seconds


class Service:
    """What runs over one pool."""

    def __init__(
        self, seed: int, *, burst: int, rate: float, device: str = "simulated", segments: str = "auto"
    ) -> None:
        self.seed = seed
        self.burst = burst
        self.rate = rate
        self.draw = draw = random.Random(seed)
        self.faulty = Faulty(draw) if device == "simulated" else None
        kind = AsyncMemoryPool if self.faulty is None else SteppedPool
        self.pool = kind(
            self.faulty or device, limit=LIMIT, segment_size=4 * MIB, segments=segments, spill_limit=LIMIT,
            stall_after=None, min_free=0,
        )  # fmt: skip
        self.budgets: list[Budget] = []
        self.counts: Counter[str] = Counter()
        self.failed: Counter[str] = Counter()
        self.bytes_in = self.bytes_out = 0
        self.tasks: set[asyncio.Task[None]] = set()
        self.inner: set[asyncio.Task[None]] = set()
        self.elsewhere = 0
        self.loop: asyncio.AbstractEventLoop | None = None
        self.streams: list[Stream] = []
        self.cooked = memoryview(bytearray(LARGEST))

    # -- its life --------------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Open the pool, on a device that begins well."""
        with self._calm():
            self.device: Device = self.pool.device
            self.streams = [self.device.default_stream, *(self.device.create_stream(str(one)) for one in range(3))]
        self.plays: list[Callable[[], Awaitable[None]]] = [
            self._single, self._use, self._batch, self._lease, self._spill, self._copy, self._late, self._give_up,
            self._at_once, self._drop, self._thread,
        ]  # fmt: skip
        self.odds = list(itertools.accumulate((50, 20, 6, 4, 2, 2, 8, 4, 4, 1, 0.2)))

    def minute(self) -> None:
        """Serve a burst of requests, let the rest of the minute pass, and see that nothing is lost."""
        if self.loop is None:
            self.loop = self._new_loop()
        ends = self.draw.random() < 0.02
        self.loop.run_until_complete(self._burst(ends))
        if ends:
            self._end_loop()
        with self._calm():
            self._check_all(ended=ends)

    def close(self) -> None:
        """Close the pool: all that it ever took from the device has to go back."""
        with self._calm():
            if self.loop is not None:
                self.loop.run_until_complete(self._change_back())
                self._end_loop()
            self._check_all(ended=True)
            self.pool.close()
            stats = self.pool.stats()
            if stats.reserved_bytes or stats.allocated_bytes:
                self._fail(f"the pool is closed and has {stats.reserved_bytes} bytes")
            if self.faulty is not None and self.faulty.reserved:
                self._fail(f"{self.faulty.reserved} bytes of the device never went back")

    def _new_loop(self) -> asyncio.AbstractEventLoop:
        if self.faulty is None:
            return asyncio.new_event_loop()
        return Loop(self.draw.randrange(2**32), max_steps=sys.maxsize, horizon=math.inf)

    def _end_loop(self) -> None:
        """Close the loop, whatever its tasks are waiting for; the pool goes on with the next."""
        assert self.loop is not None
        for task in self.tasks | self.inner:
            task._log_destroy_pending = False  # type: ignore[attr-defined]  # that is what this is about
        self.counts["loops"] += 1
        self.counts["tasks left behind"] += len(self.tasks)
        self.tasks.clear()
        self.inner.clear()
        self.loop.close()
        self.loop = None
        worker = self.pool._opened.worker
        if isinstance(worker, StepWorker):
            while worker._step():  # those of that loop, which a thread would take
                pass

    async def _burst(self, ends: bool) -> None:
        """Let requests come; return when all have ended, or where the loop is to end before."""
        loop = asyncio.get_running_loop()
        started, due = loop.time(), 0.0
        last = self.draw.randrange(self.burst) if ends else self.burst
        ticking = self._keep(self._tick()) if self.faulty is not None else None
        for number in range(last):
            self._keep(self._play())
            if self.draw.random() < 0.003:
                self._change()
            if number % 10 == 9:
                due += 10 / self.rate
                await asyncio.sleep(started + due - loop.time())
                if self.faulty is not None:
                    self.faulty.advance(10 / self.rate)
        if ends:
            return
        if playing := self.tasks - {ticking}:
            _, late = await asyncio.wait(playing, timeout=60 if self.faulty is None else 600)
            if late:
                found = gc.collect()
                ended, _ = await asyncio.wait(late, timeout=5)
                self._fail(f"{len(late)} never end, {len(ended)} when {found} are collected: {next(iter(late))}")
        if ticking is not None:
            await self._pass_the_time(started + 60)
            ticking.cancel()
            await asyncio.wait([ticking])

    async def _pass_the_time(self, until: float) -> None:
        """Let the virtual time of the loop go on, now and then by a jump that nobody expects."""
        loop = asyncio.get_running_loop()
        if isinstance(loop, Loop) and self.draw.random() < 0.1:
            loop.jump(self.draw.random() * 3600)
        await asyncio.sleep(max(0.0, until - loop.time()))

    def _keep(self, play: Awaitable[None]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(play)
        self.tasks.add(task)
        task.add_done_callback(self._gone)
        return task

    def _gone(self, task: asyncio.Task[None]) -> None:
        self.tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._fail("an error that no user would expect", task.exception())

    async def _tick(self) -> None:
        opened = self.pool._opened
        while True:
            await asyncio.sleep(TICK)
            assert self.faulty is not None
            self.faulty.advance(TICK)
            opened.worker.submit(opened.tick)
            opened.worker.submit(lambda: opened.beat() and None)

    def _check_all(self, *, ended: bool) -> None:
        """Raise where an invariant does not hold, or something is held that nobody has."""
        if self.faulty is not None:
            self.faulty.run_until_idle()
        try:
            self.pool.check()
            if not self.tasks:
                self.pool.resize(limit=LIMIT)
                self._let_all_end(collecting=ended)
                left = self.pool.stats().allocated_bytes
                assert not left, f"{left} bytes wait for the garbage collector"
                whole(self.pool)
        except AssertionError as error:
            self._fail(str(error), error)
        if self.bytes_in != self.bytes_out:
            self._fail(f"{self.bytes_in} bytes came in and {self.bytes_out} went out")

    def _let_all_end(self, *, collecting: bool) -> None:
        """Give other threads a moment for what nobody has waited for; tasks of a loop that has ended are garbage."""
        until = time.monotonic() + 30
        while (stats := self.pool.stats()).allocated_bytes or stats.waiting or stats.growing:
            if time.monotonic() >= until:
                return
            if not collecting or not gc.collect():
                time.sleep(0.001)

    def _fail(self, text: str, error: BaseException | None = None) -> None:
        opened = self.pool._opened
        lines = [f"SEED {self.seed}: {text}", self.line(), *map(str, self.pool.waiters())]
        lines += [shortage(opened, share, ()) for share in list(opened.shares.values())]
        lines += [str(block) for block in opened.core.blocks() if block.state == "live"][:20]
        print(*lines, opened.core.scheduler.gauges(), sep="\n", file=sys.stderr)  # noqa: T201  # what the script is for
        raise AssertionError(f"seed {self.seed}: {text}") from error

    @contextmanager
    def _calm(self) -> Iterator[None]:
        """Let no call of the device fail inside the block."""
        if self.faulty is not None:
            self.faulty.faults.on = False
        yield
        if self.faulty is not None:
            self.faulty.faults.on = True

    # -- what is asked for -----------------------------------------------------------------------------------------

    async def _play(self) -> None:
        play = self.draw.choices(self.plays, cum_weights=self.odds)[0]
        self.counts["requests"] += 1
        try:
            await play()
        except AsyncmemError as error:
            self.failed[type(error).__name__] += 1
        else:
            self.counts["served"] += 1

    def _share(self) -> AsyncMemoryPool | Budget:
        return self.draw.choice(self.budgets) if self.budgets and self.draw.random() < 0.5 else self.pool

    def _size(self) -> int:
        most = LARGEST if self.draw.random() < 0.2 else 64 * KIB
        return self.draw.randrange(1, most)

    def _stream(self) -> Stream:
        return self.draw.choice(self.streams)

    @asynccontextmanager
    async def _took(self, nbytes: int) -> AsyncIterator[None]:
        """Count bytes as they come in, and go out, also where the task is never finished."""
        self.bytes_in += nbytes
        try:
            yield
        finally:
            self.bytes_out += nbytes

    async def _hold(self, *buffers: Buffer) -> None:
        """Work on memory for a while."""
        async with self._took(sum(one.nbytes for one in buffers)):
            for buffer in buffers:
                self._work(buffer)
            await asyncio.sleep(self.draw.expovariate(500))

    def _work(self, buffer: Buffer) -> None:
        if not buffer.nbytes:
            return
        self.device.fill(buffer.address, buffer.nbytes, 7, buffer.stream)
        if self.faulty is not None and self.draw.random() < 0.5:
            buffer.stream.launch(self.draw.random() * 0.01, writes=[buffer])

    async def _single(self) -> None:
        async with self._share().allocate_async(self._size(), stream=self._stream()) as buffer:
            await self._hold(buffer)

    async def _use(self) -> None:
        """On several streams, and freed on another than its home."""
        buffer = await self._share().allocate_async(self._size(), stream=self._stream())
        try:
            buffer.use_on(self._stream())
            if self.draw.random() < 0.3:
                buffer.hand_over(self._stream())
            await self._hold(buffer)
        finally:
            buffer.free(self._stream())

    async def _batch(self) -> None:
        sizes = [self.draw.randrange(0, MIB) for _ in range(self.draw.randrange(1, 6))]
        async with self._share().allocate_batch(sizes, stream=self._stream()) as batch:
            await self._hold(*batch)

    async def _lease(self) -> None:
        async with self._share().lease(self.draw.randrange(MIB, 4 * MIB), stream=self._stream()) as lease:
            inner = lease.budget("inner", limit=MIB)
            async with inner.allocate_async(self.draw.randrange(1, MIB // 2)) as one:
                await self._hold(one, *filter(None, [lease.try_allocate(self.draw.randrange(1, MIB))]))

    async def _spill(self) -> None:
        share = self._share()
        held = share.spillable(await share.allocate_async(self._size(), stream=self.streams[0]))
        try:
            for _ in range(2):
                await asyncio.sleep(self.draw.random() * 0.01)
                async with held as buffer:
                    await self._hold(buffer)
        finally:
            held.free()

    async def _copy(self) -> None:
        async with self._share().allocate_async(self._size(), stream=self._stream()) as buffer:
            host = self.cooked[: buffer.nbytes]
            await buffer.copy_from(host)
            await buffer.copy_to(host)

    async def _late(self) -> None:
        """With a deadline, while it holds something."""
        async with self._share().allocate_async(self._size(), stream=self._stream()) as kept:
            more = self._share().allocate_async(self._size(), stream=self._stream(), timeout=self.draw.random() * 0.01)
            async with more as buffer:
                await self._hold(kept, buffer)

    async def _give_up(self) -> None:
        """Cancelled at some point.

        The task keeps its error, and with it the buffers of its frames. So it is none of those that a burst waits for:
        while one of them waits for this memory, nothing would let go of it.
        """
        task = asyncio.ensure_future(self.draw.choice([self._single, self._batch, self._lease, self._spill])())
        self.inner.add(task)
        await asyncio.wait([task], timeout=self.draw.random() * 0.004)
        self.counts["cancelled"] += task.cancel()
        await asyncio.wait([task])
        self.inner.discard(task)
        error = None if task.cancelled() else task.exception()
        try:
            if error is not None:
                raise error
        finally:
            del (
                error,
                task,
            )  # the error keeps this frame, which would keep the error, and the buffers of its other frames

    async def _at_once(self) -> None:
        """From code that cannot await, and does not wait."""
        buffer = self._share().try_allocate(self._size(), stream=self._stream())
        if buffer is not None:
            with buffer:
                await self._hold(buffer)

    async def _drop(self) -> None:
        """Asked for, and forgotten."""
        self._share().allocate_async(self._size(), stream=self._stream())

    async def _thread(self) -> None:
        def block() -> None:
            with self._share().allocate(self._size(), timeout=0.001):
                self.counts["by threads"] += 1

        loop = asyncio.get_running_loop()
        outside = loop.external_work() if isinstance(loop, Loop) else contextlib.nullcontext()
        with outside:
            await asyncio.to_thread(block)

    # -- what changes meanwhile ------------------------------------------------------------------------------------

    def _change(self) -> None:
        """Change one thing."""
        draw = self.draw
        with contextlib.suppress(AsyncmemError):
            match draw.randrange(6):
                case 0 if len(self.budgets) < 8:
                    parent = self._share()
                    self.budgets.append(parent.budget(f"tenant {draw.random()}", limit=draw.randrange(MIB, LIMIT)))
                case 0 | 1 if self.budgets:
                    draw.choice(self.budgets).close()
                    self.budgets = [one for one in self.budgets if not one._ended]  # those inside are, too
                case 2 if self.budgets:
                    draw.choice(self.budgets).resize(limit=draw.randrange(MIB, LIMIT))
                case 3:
                    self.pool.resize(limit=draw.choice([LIMIT, LIMIT, LOWEST]))
                case 4:
                    self.pool.empty_cache()
                case 5 if self.faulty is not None:
                    self._take_elsewhere(draw.choice([0, 0, 16 * MIB, LIMIT]))
        self.counts["changes"] += 1

    def _take_elsewhere(self, nbytes: int) -> None:
        assert self.faulty is not None
        self.faulty.give_back_elsewhere(self.elsewhere)
        self.faulty.take_elsewhere(nbytes)
        self.elsewhere = nbytes

    async def _change_back(self) -> None:
        while self.budgets:
            self.budgets.pop().close()

    # -- what is told ----------------------------------------------------------------------------------------------

    def line(self) -> str:
        """Return the figures so far."""
        stats = self.pool.stats()
        faults = dict(self.faulty.faults.made) if self.faulty is not None else {}
        return (
            f"{dict(self.counts)} failed {dict(self.failed)} faults {faults} in {self.bytes_in} out {self.bytes_out} "
            f"live {stats.allocated_bytes} reserved {stats.reserved_bytes} rss {rss()} descriptors {descriptors()}"
        )


def rss() -> int:
    """Return the bytes that this process has in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def descriptors() -> int:
    """Return how many files this process has open."""
    return sum(1 for _ in Path("/proc/self/fd").iterdir()) - 1


class Growth:
    """Whether the process grows once it has warmed up."""

    def __init__(self) -> None:
        self._rss = self._descriptors = 0

    def warm(self) -> None:
        """Take what there is now as usual."""
        gc.collect()
        self._rss, self._descriptors = max(self._rss, rss()), max(self._descriptors, descriptors())

    def look(self, service: Service) -> None:
        """Raise where there is more than was usual."""
        gc.collect()
        if rss() > self._rss + ROOM or descriptors() > self._descriptors:
            service._fail(f"it had {self._rss} bytes and {self._descriptors} descriptors, and has grown")


@contextmanager
def without_collecting() -> Iterator[None]:
    """Turn the garbage collector off inside the block: whatever is dropped has to go back without it."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def run(service: Service, over: Callable[[int], bool], tell: Callable[[str], object] | None = None) -> None:
    """Let a service go on minute after minute until it is over, and close it.

    Args:
        service: The service.
        over: Asked with the number of minutes so far.
        tell: Called with a line for each hour.

    Raises:
        AssertionError: A promise was broken; the text has the seed.
    """
    growth = Growth()
    with warnings.catch_warnings(), without_collecting():
        warnings.simplefilter("ignore", RuntimeWarning)  # a fault that met nobody who waits is a warning
        service.open()
        for minute in itertools.count():
            if over(minute):
                break
            service.minute()
            if minute % 60 == 59 or over(minute + 1):
                if tell is not None:
                    tell(f"hour {minute // 60 + 1}: {service.line()}")
                if minute < 240:
                    growth.warm()
                else:
                    growth.look(service)
        service.close()
        if service.bytes_in != service.bytes_out:
            service._fail("bytes are lost")


def beside(end: threading.Event) -> list[threading.Thread]:
    """Have torch and CuPy, where they are installed, allocate and work on the card until the event."""

    def with_torch() -> None:
        import torch

        while not end.wait(0.001):
            with contextlib.suppress(torch.cuda.OutOfMemoryError):
                one = torch.rand(random.randrange(1, 2048), 1024, device="cuda")
                (one @ one.T).sum().item()
            if random.random() < 0.01:
                torch.cuda.empty_cache()

    def with_cupy() -> None:
        import cupy

        while not end.wait(0.001):
            with contextlib.suppress(cupy.cuda.memory.OutOfMemoryError):
                one = cupy.random.rand(random.randrange(1, 2048), 1024)
                float((one * 2).sum())
            if random.random() < 0.01:
                cupy.get_default_memory_pool().free_all_blocks()

    threads = [
        threading.Thread(target=work, name=name, daemon=True)
        for name, work in {"torch": with_torch, "cupy": with_cupy}.items()
        if find_spec(name) is not None
    ]
    for thread in threads:
        thread.start()
    return threads


def main() -> None:
    """Read the command line, run, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=int, default=1440, help="of virtual time; a day of it by default")
    parser.add_argument("--burst", type=int, default=BURST, help="requests at the beginning of each minute")
    parser.add_argument("--rate", type=float, default=10_000.0, help="requests a second in a burst")
    parser.add_argument("--segments", default="auto,paged", help="how the pool gets its memory, one after the other")
    parser.add_argument("--seed", type=int, default=random.randrange(2**32))
    parser.add_argument("--device", default="simulated", help='a real one, such as "cuda:0", runs in real time')
    parser.add_argument("--seconds", type=float, default=1800.0, help="of real time, on a real device")
    options = parser.parse_args()
    kinds = options.segments.split(",")
    end = threading.Event()
    threads = beside(end) if options.device != "simulated" else []
    print(f"seed {options.seed}, beside torch and CuPy: {[one.name for one in threads] or 'no'}", flush=True)  # noqa: T201  # what the script is for
    for kind in kinds:
        started = time.monotonic()

        def over(minute: int, started: float = started) -> bool:
            if options.device == "simulated":
                return minute >= options.minutes // len(kinds)
            return time.monotonic() - started >= options.seconds / len(kinds)

        service = Service(options.seed, burst=options.burst, rate=options.rate, device=options.device, segments=kind)
        run(service, over, partial(print, kind, flush=True))
        print(f"{kind}: {time.monotonic() - started:.0f} s, all of {service.bytes_in} bytes came back")  # noqa: T201  # what the script is for
    end.set()
    for thread in threads:
        thread.join(60)


if __name__ == "__main__":
    main()
