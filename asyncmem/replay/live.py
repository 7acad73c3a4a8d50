"""Runs a trace through a real pool, on whatever device that has, and keeps that device behind its program."""

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, suppress
from ctypes import c_uint64
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Final, TypeAlias, final

import numpy as np
from numpy.typing import NDArray

from asyncmem.core import Buffer
from asyncmem.devices import Device, Host, Metal, MetalStream, OpenCL, OpenCLStream, Simulated, Stream
from asyncmem.devices.cuda import CUDA, Cuda
from asyncmem.devices.host import HostQueue, HostStream
from asyncmem.devices.simulated.stream import SimulatedStream
from asyncmem.devices.simulated.timeline import VirtualClock
from asyncmem.errors import DeviceError, InvalidRequest, OutOfMemoryError
from asyncmem.options import PoolOptions
from asyncmem.pool import AsyncMemoryPool
from asyncmem.replay.model import Model
from asyncmem.replay.run import Outcome
from asyncmem.replay.trace import Trace

Take: TypeAlias = Callable[..., Buffer]
Step: TypeAlias = tuple[int, int, Stream | None]
"""Slot; bytes, or -1 to free; the stream, None for the default or a buffer's home."""

KERNELS: Final = b"""
.version 6.3
.target sm_70
.address_size 64
.visible .entry note_time(.param .u64 where) {
    .reg .u64 %where, %now;
    ld.param.u64 %where, [where];
    mov.u64 %now, %globaltimer;
    st.global.u64 [%where], %now;
    ret;
}
.visible .entry spin(.param .u64 where, .param .u64 nanoseconds) {
    .reg .pred %early;
    .reg .u64 %where, %start, %now, %long;
    ld.param.u64 %where, [where];
    ld.param.u64 %long, [nanoseconds];
    ld.global.u64 %start, [%where];
again:
    mov.u64 %now, %globaltimer;
    sub.u64 %now, %now, %start;
    setp.lt.u64 %early, %now, %long;
    @%early bra again;
    ret;
}
\0"""
"""One that notes the card's time, and one that ends so long after that, whenever it begins; any card from 7.0 on.

The end counts and not the length, or a program of a minute would leave the card further behind with each kernel.
"""


class Busy(ABC):
    """Gives a device work that touches no memory. It runs in real time unless the device has a clock of its own."""

    def now(self) -> float:
        """Return the time in seconds."""
        return time.perf_counter()

    def until(self, when: float) -> None:
        """Let time pass until then (blocks)."""
        time.sleep(max(0.0, when - time.perf_counter()))

    @abstractmethod
    def hold(self, stream: Stream, until: float) -> None:
        """Put work behind all that the stream has to do that ends then, or at once where that is past."""

    def close(self) -> None:  # noqa: B027 -- most need nothing
        """Give back what this needs; called once the device has done all its work."""


class ThreadBusy(Busy):
    """Has the thread of the host sleep that does a stream's work."""

    def hold(self, stream: Stream, until: float) -> None:
        assert isinstance(stream, HostStream | MetalStream)
        run = stream.run if isinstance(stream, HostStream) else stream.run_on_host
        run(partial(self.until, until))


class SimulatedBusy(Busy):
    """Launches what takes no real time, on a device whose clock it moves where that is virtual."""

    def __init__(self, device: Simulated) -> None:
        self._device = device

    def now(self) -> float:
        """Return the device's time."""
        return self._device.now

    def until(self, when: float) -> None:
        """Move the device's time to then; it may be later already."""
        missing = max(0.0, when - self._device.now)
        if isinstance(self._device.clock, VirtualClock):
            self._device.advance(missing)
        else:
            time.sleep(missing)

    def hold(self, stream: Stream, until: float) -> None:
        """Put work behind all that the stream has to do that ends then, or at once where that is past."""
        assert isinstance(stream, SimulatedStream)
        before, _ = self._device.timeline.record(stream.timeline_key)  # or another stream's work that it waits for
        stream.launch(max(0.0, until - max(self.now(), before)))


class CudaBusy(Busy):
    """Launches kernels that spin on one thread of the card; its context is current on the caller's thread meanwhile."""

    def __init__(self, device: Cuda) -> None:
        self._call = CUDA(device.name).call  # which the device does not count
        self._device = self._call("cuDeviceGet", device.index)
        self._before = self._call("cuCtxGetCurrent")
        self._call("cuCtxSetCurrent", self._call("cuDevicePrimaryCtxRetain", self._device))
        self._module = self._call("cuModuleLoadData", KERNELS)
        self._spin = self._call("cuModuleGetFunction", self._module, b"spin")
        self._began_at = int(self._call("cuMemAlloc", 8))
        note_time = self._call("cuModuleGetFunction", self._module, b"note_time")
        for _ in range(2):  # the first launch takes longer
            self._launch(note_time, 0, self._began_at)
            self._call("cuCtxSynchronize")
            self._began = self.now()

    def hold(self, stream: Stream, until: float) -> None:
        """Put work behind all that the stream has to do that ends then, or at once where that is past."""
        self._launch(self._spin, stream.handle, self._began_at, max(0, round((until - self._began) * 1e9)))

    def _launch(self, kernel: object, stream: int, *numbers: int) -> None:
        parameters = numbers, (c_uint64,) * len(numbers)
        self._call("cuLaunchKernel", kernel, 1, 1, 1, 1, 1, 1, 0, stream, parameters, 0)

    def close(self) -> None:
        """Wait for the kernels, and leave the context (blocks)."""
        self._call("cuCtxSynchronize")
        self._call("cuMemFree", self._began_at)
        self._call("cuModuleUnload", self._module)
        self._call("cuCtxSetCurrent", self._before)
        self._call("cuDevicePrimaryCtxRelease", self._device)


class OpenCLBusy(Busy):
    """Holds a queue at a gate, which a thread opens once the work before it is done and the time has passed."""

    def __init__(self, device: OpenCL) -> None:
        self._device = device
        self._queues: dict[Stream, HostQueue] = {}

    def hold(self, stream: Stream, until: float) -> None:
        """Put work behind all that the stream has to do that ends then, or at once where that is past."""
        assert isinstance(stream, OpenCLStream)
        driver, before = self._device.driver, stream.record()
        gate = driver.call(driver.cl.UserEvent, self._device.context)
        driver.call(driver.cl.enqueue_barrier, stream.queue, wait_for=[gate])

        def open_gate() -> None:
            with suppress(DeviceError):  # raised where the stream is used next; the gate opens in any case
                before.block()
            self.until(until)
            driver.call(gate.set_status, driver.cl.command_execution_status.COMPLETE)

        queue = self._queues.setdefault(stream, HostQueue(f"asyncmem {self._device.name} {stream.name} busy"))
        queue.submit(open_gate)

    def close(self) -> None:
        """Wait for the threads (blocks)."""
        for queue in self._queues.values():
            queue.stop()
            queue.join()


def busy_for(device: Device) -> Busy:
    """Return what keeps that device busy.

    Raises:
        InvalidRequest: It is no device that can be given such work.
    """
    match device:
        case Simulated():
            return SimulatedBusy(device)
        case Host() | Metal():
            return ThreadBusy()
        case Cuda():
            return CudaBusy(device)
        case OpenCL():
            return OpenCLBusy(device)
    raise InvalidRequest("lag", device, "a device that can be kept busy: host, simulated, cuda, metal or opencl")


@final
@dataclass(frozen=True, kw_only=True, repr=False)
class LiveReplay(Outcome):
    """What became of a program that was replayed by a real pool: `Outcome`, and where that was.

    A wait is an allocation that took longer than a millisecond, where the device is late; `ns_per_op` is that of the
    others, growth included.

    Attributes:
        device: The name of the pool's device.
        options: The pool's.
        lag: How late the device was kept.
        driver_calls: Calls to the device's driver.
    """

    device: str
    options: PoolOptions
    lag: float
    driver_calls: int

    @property
    def _by(self) -> str:
        return f"on {self.device}"


BEAT: Final = 1e-3
"""Seconds of program time after which a device that is to be late gets more work."""

BEATS_AFTER: Final = 8
"""For so many of them it is when the program pauses: the pool's worker records fences of what was freed before."""

LONG: Final = 1e-3
"""Seconds from which on an allocation counts as a wait."""

_LOOKS: Final = 32
"""How often it is looked, in twice the lag, whether memory that lacks has come free."""


def replay_on(pool: AsyncMemoryPool, trace: Trace, *, lag: float = 0.0, pace: float | None = None) -> LiveReplay:
    """Replay a program through a pool: return what it reserved, and what that cost (blocks).

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
    model = Model(lag=lag, pace=1.0 if pace is None else pace)
    with ExitStack() as stack:
        busy = stack.enter_context(closing(busy_for(pool.device))) if lag or pace else None
        program = _Program(pool, trace, lag)
        stack.callback(program.end)
        if busy is None:
            program.run()
        else:
            program.run_late(busy, np.multiply(trace.steps().time_us, model.pace / 1e6, dtype=np.float64))
        return program.result(trace.duration * model.pace)


class _Program:
    """One run: what is held, what was waited, and until when each stream has work."""

    def __init__(self, pool: AsyncMemoryPool, trace: Trace, lag: float) -> None:
        self._pool = pool
        self._trace = trace
        self._lag = lag
        more = (pool.device.create_stream(f"stream {number}") for number in range(1, trace.streams))
        self._streams = [pool.device.default_stream, *more]
        self._steps = _steps(trace, self._streams)
        self._held: dict[int, Buffer] = {}
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
            failed_row=None if failed is None else self._trace.row_of(failed),
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
        for buffer in self._held.values():
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
                else:
                    held.pop(slot).free(stream=stream)
            at = end
        except OutOfMemoryError:
            self._failed = at
        self._spent += time.perf_counter() - started - (self._idle - idle)
        self._done = at

    def _take_late(self, busy: Busy, nbytes: int, *, stream: Stream | None) -> Buffer:
        began, started = busy.now(), time.perf_counter()
        try:
            for look in range(1, _LOOKS + 1):
                try:
                    return self._pool.allocate(nbytes, stream=stream)
                except OutOfMemoryError:
                    busy.until(began + 2 * self._lag * look / _LOOKS)
            return self._pool.allocate(nbytes, stream=stream)
        finally:
            took = busy.now() - began
            if took > LONG:
                self._waits += 1
                self._waited += took
                self._idle += time.perf_counter() - started


def _steps(trace: Trace, streams: Sequence[Stream]) -> list[Step]:
    steps = trace.steps()
    takes = steps.nbytes >= 0
    homes = steps.stream[takes]  # allocations are numbered in their order
    unnamed = np.where(takes, steps.stream == 0, steps.stream == homes[steps.slot])
    columns = (steps.slot.tolist(), steps.nbytes.tolist(), steps.stream.tolist(), unnamed.tolist())
    return [
        (slot, nbytes, None if home else streams[stream]) for slot, nbytes, stream, home in zip(*columns, strict=True)
    ]


def _beats(times: NDArray[np.float64]) -> Iterator[tuple[int, int, float]]:
    """Return the steps of each stretch of a beat in which there are any: first, end, and when it begins."""
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
