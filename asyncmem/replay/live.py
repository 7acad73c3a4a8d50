"""Runs a trace through a real pool, on whatever device that has."""

from __future__ import annotations

import math
import time
from contextlib import ExitStack, closing
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Final, TypeAlias

import numpy as np

from asyncmem.errors import InvalidRequest, OutOfMemoryError
from asyncmem.replay.busy import busy_for
from asyncmem.replay.columns import Op
from asyncmem.replay.result import LiveReplay

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

    from asyncmem.core import Buffer
    from asyncmem.devices import Stream
    from asyncmem.pool import AsyncMemoryPool
    from asyncmem.replay.busy import Busy
    from asyncmem.replay.trace import Trace

    Take: TypeAlias = Callable[..., Buffer]
    Step: TypeAlias = tuple[int, int, Stream | None]
    """Slot; bytes, or -1 to free; the stream, None for the default or a buffer's home."""

BEAT: Final = 1e-3
"""Seconds of program time after which a device that is to be late is given work anew."""

BEATS_AFTER: Final = 8
"""For so many of them it is when the program pauses: the pool's worker records fences of what was freed before."""

LONG: Final = 1e-3
"""Seconds from which on an allocation counts as a wait."""

_LOOKS: Final = 32
"""How often it is looked, in twice the lag, whether memory that lacks has come free."""


def replay_on(pool: AsyncMemoryPool, trace: Trace, *, lag: float = 0.0, pace: float | None = None) -> LiveReplay:
    """Replay a program through a pool: answer what it reserved, and what that cost (blocks).

    Each stream of the trace is a new stream of the device; number 0 is the default stream. With neither `lag` nor
    `pace` the streams have nothing to do, and the program goes as fast as it can. With one of them it keeps its
    recorded times. With `lag` the streams are kept busy: kernels that spin, or sleep on the host, end so much later
    than the program gives them. Memory that lacks then is waited for, up to twice the lag. A pool's worker goes by real
    time: on a virtual clock, which is ahead of that, it sees later than it would that memory is ready, and for a
    program that does the work of minutes in a second it looks too seldom.

    Args:
        pool: A pool that nothing else uses, and that nothing has used: its peaks are answered. Not closed here.
        trace: What the program did.
        lag: How late the device is, in seconds.
        pace: What the recorded times are multiplied by; None for 1 with a lag, and for no times to keep without.

    Raises:
        InvalidRequest: A number is negative or not finite, or the device cannot be kept busy.
    """
    for name, value in (("lag", lag), ("pace", 1.0 if pace is None else pace)):
        if not 0 <= value < math.inf:
            raise InvalidRequest(name, value, "a number from 0")
    with ExitStack() as stack:
        busy = stack.enter_context(closing(busy_for(pool.device))) if lag or pace else None
        pace = 1.0 if pace is None else pace
        program = _Program(pool, trace, lag)
        stack.callback(program.end)
        if busy is None:
            program.run()
        else:
            program.run_late(busy, np.multiply(trace.steps().time_us, pace / 1e6, dtype=np.float64))
        return program.result(trace.duration * pace)


class _Program:
    """One run: what is held, what was waited, and until when each stream has work."""

    def __init__(self, pool: AsyncMemoryPool, trace: Trace, lag: float) -> None:
        self._pool = pool
        self._trace = trace
        self._lag = lag
        self._streams = _streams(pool, trace)
        self._steps = _steps(trace, self._streams)
        self._held: list[Buffer | None] = [None] * trace.allocations
        self._done = 0
        self._failed: int | None = None
        self._waits = 0
        self._waited = 0.0
        self._last = -math.inf  # when the program did something last
        self._spent = 0.0
        self._idle = 0.0  # what waits took of the real time
        self._calls = pool.stats().driver_calls

    def run(self) -> None:
        self._go(0, len(self._steps), self._pool.allocate)

    def run_late(self, busy: Busy, times: NDArray[np.float64]) -> None:
        began = busy.now()
        take = partial(self._take_late, busy)
        for first, end, when in _beats(times):
            self._pass_time(busy, began + when + self._waited)
            self._go(first, end, take)
            if self._failed is not None:
                return

    def result(self, duration: float) -> LiveReplay:
        stats = self._pool.stats()
        done = self._steps[: self._done]
        takes = sum(1 for _, nbytes, _ in done if nbytes >= 0)
        failed = self._failed
        return LiveReplay(
            name=self._trace.name,
            device=self._pool.device.name,
            options=self._pool.options,
            lag=self._lag,
            limit=stats.limit,
            completed=failed is None,
            failed_row=None if failed is None else int(np.flatnonzero(self._trace.op <= Op.FREE)[failed]),
            failed_bytes=0 if failed is None else self._steps[failed][1],
            duration=duration,
            peak_requested=self._trace.peak_requested,
            peak_active=stats.peak_allocated,
            peak_reserved=stats.peak_reserved,
            takes=takes,
            frees=len(done) - takes,
            driver_calls=stats.driver_calls - self._calls,
            waits=self._waits,
            wait_seconds=self._waited,
            ns_per_op=max(0.0, self._spent - _empty_loop(done)) / len(done) * 1e9 if done else 0.0,
        )

    def end(self) -> None:
        for buffer in self._held:
            if buffer is not None:
                buffer.free()
        for stream in self._streams:
            stream.synchronize_blocking()

    def _pass_time(self, busy: Busy, until: float) -> None:
        # The device stays late while the program pauses: for as long as there may be fences yet to record.
        while self._lag:
            self._keep_late(busy)
            now = busy.now()
            if until - now < 2 * BEAT or now > self._last + BEATS_AFTER * BEAT:
                break
            busy.until(now + BEAT)
        busy.until(until)
        if self._lag:
            self._keep_late(busy)
        self._last = busy.now()

    def _keep_late(self, busy: Busy) -> None:
        now = busy.now()
        for stream in self._streams:
            busy.hold(stream, now + self._lag)

    def _go(self, first: int, end: int, take: Take) -> None:
        held, at = self._held, first
        idle, started = self._idle, time.perf_counter()
        try:
            for at in range(first, end):
                slot, nbytes, stream = self._steps[at]
                if nbytes >= 0:
                    held[slot] = take(nbytes, stream=stream)
                    continue
                buffer, held[slot] = held[slot], None
                assert buffer is not None
                buffer.free(stream=stream)
            at = end
        except OutOfMemoryError:
            self._failed = at
        self._spent += time.perf_counter() - started - (self._idle - idle)
        self._done = at

    def _take_late(self, busy: Busy, nbytes: int, *, stream: Stream | None) -> Buffer:
        began, started = busy.now(), time.perf_counter()
        try:
            return self._take_soon(busy, nbytes, stream)
        finally:
            took = busy.now() - began
            if took > LONG:
                self._waits += 1
                self._waited += took
                self._idle += time.perf_counter() - started

    def _take_soon(self, busy: Busy, nbytes: int, stream: Stream | None) -> Buffer:
        began = busy.now()
        for look in range(1, _LOOKS + 1):
            try:
                return self._pool.allocate(nbytes, stream=stream)
            except OutOfMemoryError:
                busy.until(began + 2 * self._lag * look / _LOOKS)
        return self._pool.allocate(nbytes, stream=stream)


def _streams(pool: AsyncMemoryPool, trace: Trace) -> list[Stream]:
    device = pool.device
    return [device.default_stream, *(device.create_stream(f"stream {n}") for n in range(1, trace.streams))]


def _steps(trace: Trace, streams: Sequence[Stream]) -> list[Step]:
    steps = trace.steps()
    homes = trace.stream[trace.op == Op.ALLOCATE]
    takes = steps.nbytes >= 0
    unnamed = np.where(takes, steps.stream == 0, steps.stream == homes[steps.slot])
    columns = (steps.slot.tolist(), steps.nbytes.tolist(), steps.stream.tolist(), unnamed.tolist())
    return [
        (slot, nbytes, None if home else streams[stream]) for slot, nbytes, stream, home in zip(*columns, strict=True)
    ]


def _beats(times: NDArray[np.float64]) -> Iterator[tuple[int, int, float]]:
    """Answer the steps of each stretch of a beat in which there are any: first, end, and when it begins."""
    number = np.floor(times / BEAT).astype(np.int64)
    firsts = np.flatnonzero(np.diff(number, prepend=-1))
    for first, end in pairwise([*firsts, times.size]):
        yield int(first), int(end), float(number[first]) * BEAT


def _empty_loop(steps: Sequence[Step]) -> float:
    held: dict[int, object] = {}
    started = time.perf_counter()
    for at in range(len(steps)):
        slot, nbytes, _ = steps[at]
        held[slot] = None if nbytes < 0 else slot
    return time.perf_counter() - started
