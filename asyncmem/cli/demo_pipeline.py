"""The pipeline of `asyncmem demo`: three stages, many more items in flight than memory, and a watch on the loop."""

import asyncio
import functools
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Final, Self, TypeAlias

import numpy as np
import numpy.typing as npt

from asyncmem import AsyncMemoryPool
from asyncmem.cli.bench.timing import percentile
from asyncmem.core import Buffer
from asyncmem.devices import Device, Host, HostStream, Simulated, SimulatedStream, Stream, device
from asyncmem.errors import InvalidRequest, PoolTimeout
from asyncmem.figures import format_size
from asyncmem.pool.share import Share
from asyncmem.stats import PoolStats

OVERSUBSCRIPTION: Final = 5
"""How many times the limit the items in flight would need if none of them waited."""

SMALLEST_LIMIT: Final = 2 << 20
LARGEST_ITEM: Final = 32 << 20
TOTAL_BYTES: Final = 16
"""What the last stage needs for one item: two numbers of 8 bytes."""
REFRESH: Final = 0.25
"""Seconds between two looks at the pool."""


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


class Demonstration:
    """Three stages over one pool, with so many items in flight that they would need several times its limit.

    The first two stages queue their work and return at once; the last is awaited. On the host the work is numpy's, in
    order on each stage's own thread, and every result is checked. On the simulated device it only takes time, and the
    device raises when two stages touch a buffer without order between them.

    Args:
        device: Where to run.
        limit: The most that the pool may reserve.
        seconds: How long new items are begun.

    Attributes:
        item_bytes: What each of the first two stages needs for one item.
        in_flight: Items worked on at once.
        demand: What they would hold together with unlimited memory.
        checks: What is compared for every result.
        stats: The pool's, when it was looked at last.
        elapsed: Seconds until then.
        items: How many are finished,
        wrong: and how many of them have a wrong result.
        longest_stall: The longest stall of the loop, in seconds,
        stall_p99: and what 99 of 100 did not exceed.

    Raises:
        InvalidRequest: The limit leaves no room for a pipeline.
    """

    def __init__(self, device: Device, limit: int, seconds: float) -> None:
        if limit < SMALLEST_LIMIT:
            raise InvalidRequest("limit", limit, f"at least {format_size(SMALLEST_LIMIT)} for the demonstration")
        self.device, self.limit, self.seconds = device, limit, seconds
        self.item_bytes = min(limit // 32, LARGEST_ITEM) // 4096 * 4096
        self.in_flight = OVERSUBSCRIPTION * limit // (2 * self.item_bytes)
        self.demand = self.in_flight * (2 * self.item_bytes + TOTAL_BYTES)
        self._is_real = isinstance(device, Host)
        self.checks = "every result against plain numpy" if self._is_real else "the stream order of every access"
        self.stats = PoolStats()
        self.elapsed = self.longest_stall = self.stall_p99 = 0.0
        self.items = self.wrong = 0

    @property
    def items_per_s(self) -> float:
        """Items finished a second so far."""
        return self.items / self.elapsed if self.elapsed else 0.0

    async def run(self, show: "Show") -> None:
        """Begin items until the time is over, finish them, and show the progress meanwhile.

        Cancelling it leaves nothing behind: every buffer is held by a `with` block, and so is the pool.
        """
        stages = ("decode", "transform", "reduce")
        self._streams = [self.device.create_stream(name) for name in stages]
        self._expected = plain_totals(self.item_bytes) if self._is_real else []
        self._numbers = itertools.count()
        async with (
            AsyncMemoryPool(self.device, limit=self.limit, segment_size=self.limit // 8, name="demo") as pool,
            Ticker() as ticker,
            asyncio.TaskGroup() as both,
        ):
            # Otherwise items that wait for their second buffer could hold all of the memory with their first, and none
            # would ever finish. An eighth stays for the last stage.
            shares = [pool.budget(name, limit=self.limit * 7 // 16) for name in stages[:2]]
            started = time.monotonic()

            def look() -> None:
                self.stats, self.elapsed = pool.stats(), time.monotonic() - started
                self.longest_stall, self.stall_p99 = ticker.longest, ticker.p99

            async def look_again() -> None:
                while True:
                    await asyncio.sleep(REFRESH)
                    with ticker.excused():
                        look()
                        show(self)

            showing = both.create_task(look_again())
            async with asyncio.TaskGroup() as workers:
                for _ in range(self.in_flight):
                    workers.create_task(self._work(started + self.seconds, *shares, pool))
                    # One after the other, as work comes in: all in one turn of the loop would be a stall of our own.
                    await asyncio.sleep(0)
            showing.cancel()
            look()

    async def _work(self, deadline: float, *shares: Share) -> None:
        # Items that have not begun by the deadline give up waiting; those that have are finished.
        with suppress(PoolTimeout):
            while (left := deadline - time.monotonic()) > 0:
                right = await self._item(next(self._numbers), left, *shares)
                self.items += 1
                self.wrong += not right

    async def _item(self, index: int, timeout: float, raws: Share, features: Share, totals: Share) -> bool:
        """Take an item through the stages, and return whether its result is right."""
        nbytes, (first, second, third) = self.item_bytes, self._streams
        async with raws.allocate_async(nbytes, stream=first, tag="raw", timeout=timeout) as raw:
            queue(first, functools.partial(decode, index), raw)
            async with features.allocate_async(nbytes, stream=second, tag="features") as feature:
                queue(second, transform, feature, reads=raw)
                # The work that reads it is still queued: its memory comes back in the order of the stream.
                raw.free()
                async with totals.allocate_async(TOTAL_BYTES, stream=third, tag="totals") as total:
                    queue(third, reduce, total, reads=feature)
                    await third.synchronize()
                    found = np.asarray(total.view("float64")) if self._expected else None
                    return found is None or np.array_equal(found, self._expected[index % VARIETIES])


Show: TypeAlias = Callable[[Demonstration], None]


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
