"""The pipeline of `asyncmem demo`: three stages, many more items in flight than memory, and a watch on the loop."""

import asyncio
import functools
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Final, Self, TypeAlias

import numpy as np
import numpy.typing as npt

from asyncmem import AsyncMemoryPool
from asyncmem.cli.bench.timing import percentile
from asyncmem.core import Buffer
from asyncmem.devices import Device, Host, HostStream, Simulated, SimulatedStream, Stream, device
from asyncmem.errors import InvalidRequest, PoolTimeout
from asyncmem.figures import format_size
from asyncmem.stats import PoolStats

OVERSUBSCRIPTION: Final = 5
"""How many times the limit the items in flight would need if none of them waited."""

SMALLEST_LIMIT: Final = 2 << 20
LARGEST_ITEM: Final = 32 << 20
TOTAL_BYTES: Final = 16
"""What the last stage needs for one item: two numbers of 8 bytes."""
REFRESH: Final = 0.25
"""Seconds between two looks at the pool."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How much work to take on, so that the demand is several times the limit. Sizes are bytes, times seconds."""

    limit: int
    """The most the pool may reserve."""
    item_bytes: int
    """What each of the first two stages needs for one item."""
    in_flight: int
    """Items worked on at once."""
    seconds: float
    """How long new items are begun."""

    @property
    def demand(self) -> int:
        """What the items in flight would hold together with unlimited memory."""
        return self.in_flight * (2 * self.item_bytes + TOTAL_BYTES)

    @property
    def stage_limit(self) -> int:
        """The share of each of the first two stages; an eighth stays for the last, so the last can always finish."""
        return self.limit * 7 // 16

    @classmethod
    def for_limit(cls, limit: int, seconds: float) -> Self:
        """Choose items of a 32nd of the limit, and so many that together they need several times that.

        Raises:
            InvalidRequest: The limit leaves no room for a pipeline.
        """
        if limit < SMALLEST_LIMIT:
            raise InvalidRequest("limit", limit, f"at least {format_size(SMALLEST_LIMIT)} for the demonstration")
        item_bytes = min(limit // 32, LARGEST_ITEM) // 4096 * 4096
        in_flight = OVERSUBSCRIPTION * limit // (2 * item_bytes)
        return cls(limit=limit, item_bytes=item_bytes, in_flight=in_flight, seconds=seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What a run has done so far."""

    plan: Plan
    device: str
    checks: str
    """What is compared for every result."""
    stats: PoolStats
    seconds: float
    items: int
    wrong: int
    longest_stall: float
    """Seconds."""
    stall_p99: float
    """Seconds."""

    @property
    def items_per_s(self) -> float:
        """Items finished a second so far."""
        return self.items / self.seconds if self.seconds else 0.0


Show: TypeAlias = Callable[[Report], None]


# -- the stages, as work on streams ------------------------------------------------------------------------------------

Floats: TypeAlias = npt.NDArray[np.float32]
Totals: TypeAlias = npt.NDArray[np.float64]

VARIETIES: Final = 16
"""Items repeat after so many, so that the right results can be computed beforehand."""

SIMULATED_SECONDS: Final = 0.002
"""How long a stage works on an item on the simulated device."""


def decode(index: int, raw: Floats) -> None:
    """Make up an item's data."""
    np.multiply(_ramp(raw.size), index % VARIETIES + 1, out=raw)
    np.remainder(raw, 251, out=raw)


def transform(raw: Floats, features: Floats) -> None:
    """Compute something of the same size."""
    np.sqrt(raw, out=features)
    np.subtract(features, features.mean(), out=features)


def reduce(features: Floats, totals: Totals) -> None:
    """Sum it up."""
    totals[0] = np.square(features).sum(dtype=np.float64)
    totals[1] = features.max()


@functools.cache
def _ramp(size: int) -> Floats:
    return np.arange(size, dtype=np.float32)


def plain_totals(nbytes: int) -> list[Totals]:
    """Compute every variety with plain numpy memory: the results of the pipeline, bit for bit."""
    raw, features = np.empty((2, nbytes // 4), np.float32)
    results = []
    for index in range(VARIETIES):
        totals = np.empty(2, np.float64)
        decode(index, raw)
        transform(raw, features)
        reduce(features, totals)
        results.append(totals)
    return results


def open_device(name: str) -> Device:
    """Open a device. The simulated one runs by the wall clock here, so that waiting really takes time.

    Raises:
        InvalidRequest: There is no such device, or the demonstration has no stages for it.
        BackendUnavailable: It is not here.
    """
    found = device(name)
    if not isinstance(found, Host | Simulated):
        found.close()
        raise InvalidRequest("device", name, 'one that the demonstration has stages for: "host" or "simulated"')
    return Simulated(clock="wall") if isinstance(found, Simulated) else found


# -- the run -----------------------------------------------------------------------------------------------------------


async def run(device: Device, plan: Plan, show: Show) -> Report:
    """Keep the plan's items in flight for its seconds, finish those begun, and return the result.

    Cancelling it leaves nothing behind: every buffer is held by a `with` block, and so is the pool.
    """
    async with (
        AsyncMemoryPool(device, limit=plan.limit, segment_size=plan.limit // 8, name="demo") as pool,
        Ticker() as ticker,
    ):
        pipeline = Pipeline(pool, plan, ticker)
        await pipeline.run(show)
        return pipeline.report()


class Pipeline:
    """Three stages over one pool. The first two queue their work and return at once; the last is awaited.

    On the host the work is numpy's, in order on each stage's own thread, and every result is checked. On the simulated
    device it only takes time, and the device raises when two stages touch a buffer without order between them.

    The first two stages have a budget each. Otherwise items that wait for their second buffer could hold all of the
    memory with their first, and none would ever finish.
    """

    def __init__(self, pool: AsyncMemoryPool, plan: Plan, ticker: "Ticker") -> None:
        self._pool, self._plan, self._ticker = pool, plan, ticker
        self._streams = [pool.device.create_stream(name) for name in ("decode", "transform", "reduce")]
        self._raws, self._features = (pool.budget(one, limit=plan.stage_limit) for one in ("decode", "transform"))
        self._expected = plain_totals(plan.item_bytes) if isinstance(pool.device, Host) else []
        self._started = time.monotonic()
        self._numbers = itertools.count()
        self._items = self._wrong = 0

    async def run(self, show: Show) -> None:
        """Begin items until the plan's time is over, finish them, and show the progress meanwhile."""
        async with asyncio.TaskGroup() as both:
            showing = both.create_task(self._show(show))
            async with asyncio.TaskGroup() as workers:
                for _ in range(self._plan.in_flight):
                    workers.create_task(self._work())
                    # One after the other, as work comes in: all in one turn of the loop would be a stall of our own.
                    await asyncio.sleep(0)
            showing.cancel()

    def report(self) -> Report:
        """Return what has been done so far."""
        return Report(
            plan=self._plan,
            device=self._pool.device.name,
            checks="every result against plain numpy" if self._expected else "the stream order of every access",
            stats=self._pool.stats(),
            seconds=time.monotonic() - self._started,
            items=self._items,
            wrong=self._wrong,
            longest_stall=self._ticker.longest,
            stall_p99=self._ticker.p99,
        )

    async def _show(self, show: Show) -> None:
        while True:
            await asyncio.sleep(REFRESH)
            with self._ticker.excused():
                show(self.report())

    async def _work(self) -> None:
        deadline = self._started + self._plan.seconds
        # Items that have not begun by the deadline give up waiting; those that have are finished.
        with suppress(PoolTimeout):
            while (left := deadline - time.monotonic()) > 0:
                right = await self._item(next(self._numbers), left)
                self._items += 1
                self._wrong += not right

    async def _item(self, index: int, timeout: float) -> bool:
        """Take an item through the stages, and return whether its result is right."""
        nbytes, (first, second, third) = self._plan.item_bytes, self._streams
        async with self._raws.allocate_async(nbytes, stream=first, tag="raw", timeout=timeout) as raw:
            queue(first, functools.partial(decode, index), raw)
            async with self._features.allocate_async(nbytes, stream=second, tag="features") as features:
                queue(second, transform, features, reads=raw)
                # The work that reads it is still queued: its memory comes back in the order of the stream.
                raw.free()
                async with self._pool.allocate_async(TOTAL_BYTES, stream=third, tag="totals") as totals:
                    queue(third, reduce, totals, reads=features)
                    await third.synchronize()
                    found = np.asarray(totals.view("float64")) if self._expected else None
                    return found is None or np.array_equal(found, self._expected[index % VARIETIES])


def queue(stream: Stream, work: Callable[..., None], writes: Buffer, *, reads: Buffer | None = None) -> None:
    """Queue a stage's work on its stream, behind what is queued for the buffer that it reads."""
    used = [] if reads is None else [reads]
    for buffer in used:
        buffer.use_on(stream)
    if isinstance(stream, HostStream):
        result = writes.view("float64" if work is reduce else "float32")
        stream.run(work, *(np.asarray(one.view("float32")) for one in used), np.asarray(result))
    elif isinstance(stream, SimulatedStream):
        stream.launch(SIMULATED_SECONDS, reads=used, writes=[writes])


# -- the watch on the loop ---------------------------------------------------------------------------------------------

INTERVAL: Final = 0.005


class Ticker:
    """Puts a callback on the running loop every few milliseconds and notes how late it runs.

    A thread of its own does so. A task that sleeps could not measure it: loops round their timers up to a millisecond.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._lateness: list[int] = []
        self._excused_ns = 0
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="asyncmem demo ticker", daemon=True)

    @property
    def longest(self) -> float:
        """The longest stall so far, in seconds."""
        return max(self._lateness, default=0) / 1e9

    @property
    def p99(self) -> float:
        """What 99 of 100 ticks did not exceed, in seconds."""
        return percentile(self._lateness, 0.99) / 1e9 if self._lateness else 0.0

    @contextmanager
    def excused(self) -> Iterator[None]:
        """Leave out what runs inside: the demonstration's own drawing is not what is measured."""
        start = time.perf_counter_ns()
        try:
            yield
        finally:
            self._excused_ns += time.perf_counter_ns() - start

    async def __aenter__(self) -> Self:
        # Starting and joining a thread take a moment, and this loop's moments are what is measured.
        await asyncio.to_thread(self._thread.start)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._stopping = True
        await asyncio.to_thread(self._thread.join)

    def _run(self) -> None:
        while not self._stopping:
            self._loop.call_soon_threadsafe(self._tick, time.perf_counter_ns(), self._excused_ns)
            time.sleep(INTERVAL)

    def _tick(self, posted: int, excused: int) -> None:
        late = time.perf_counter_ns() - posted - (self._excused_ns - excused)
        self._lateness.append(max(late, 0))
