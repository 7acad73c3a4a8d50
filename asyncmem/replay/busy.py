"""Work that keeps a real device behind its program for a known time, and the clock of both."""

import time
from abc import ABC, abstractmethod
from contextlib import suppress
from ctypes import c_uint64
from functools import partial
from importlib import import_module
from typing import Any, Final

from asyncmem.devices import Device, Host, Metal, MetalStream, OpenCL, OpenCLStream, Simulated, Stream
from asyncmem.devices.clock import VirtualClock
from asyncmem.devices.cuda import Cuda
from asyncmem.devices.cuda.interface import CUDA
from asyncmem.devices.host import HostStream
from asyncmem.devices.lane import Lane
from asyncmem.devices.simulated_stream import SimulatedStream
from asyncmem.errors import DeviceError, InvalidRequest

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
        """Tell the time in seconds."""
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
        """Tell the device's time."""
        return self._device.now

    def until(self, when: float) -> None:
        """Let the device's time come to then; it may be later already."""
        missing = max(0.0, when - self._device.now)
        if isinstance(self._device.clock, VirtualClock):
            self._device.advance(missing)
        else:
            time.sleep(missing)

    def hold(self, stream: Stream, until: float) -> None:
        """Put work behind all that the stream has to do that ends then, or at once where that is past."""
        assert isinstance(stream, SimulatedStream)
        before, _ = self._device.timeline.record(stream.lane)  # which may be another stream's work that it waits for
        stream.launch(max(0.0, until - max(self.now(), before)))


class CudaBusy(Busy):
    """Launches kernels that spin on one thread of the card; its context is current on the caller's thread meanwhile."""

    def __init__(self, device: Cuda) -> None:
        self._driver: Any = import_module("cuda.bindings.driver")
        self._name = device.name
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

    def _call(self, name: str, *arguments: object) -> Any:  # noqa: ANN401 -- cuda-python says no types
        code, *values = getattr(self._driver, name)(*arguments)
        if int(code):
            raise CUDA.error_of(name, int(code), self._name)
        return values[0] if values else None


class OpenCLBusy(Busy):
    """Holds a queue at a gate, which a thread opens once the work before it is done and the time has passed."""

    def __init__(self, device: OpenCL) -> None:
        self._device = device
        self._lanes: dict[Stream, Lane] = {}

    def hold(self, stream: Stream, until: float) -> None:
        """Put work behind all that the stream has to do that ends then, or at once where that is past."""
        assert isinstance(stream, OpenCLStream)
        driver, before = self._device.driver, stream.record()
        gate = driver.call(driver.cl.UserEvent, self._device.context)
        driver.call(driver.cl.enqueue_barrier, stream.queue, wait_for=[gate])

        def open_gate() -> None:
            with suppress(DeviceError):  # whoever works there is told; the gate opens in any case
                before.block()
            self.until(until)
            driver.call(gate.set_status, driver.cl.command_execution_status.COMPLETE)

        lane = self._lanes.setdefault(stream, Lane(f"asyncmem {self._device.name} {stream.name} busy"))
        lane.submit(open_gate)

    def close(self) -> None:
        """Wait for the threads (blocks)."""
        for lane in self._lanes.values():
            lane.stop()
            lane.join()


def busy_for(device: Device) -> Busy:
    """Answer what keeps that device busy.

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
