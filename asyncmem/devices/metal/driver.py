"""PyObjC: finding it and the devices of Metal, calling it, errors in Metal's words, and memory by its addresses."""

from __future__ import annotations

import sys
import threading
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Final, ParamSpec, TypeVar, cast

from asyncmem.devices.base import INSTEAD, names_of
from asyncmem.devices.host_memory import host_memory
from asyncmem.devices.queues import SegmentSpace
from asyncmem.errors import BackendUnavailable, DeviceError, InvalidRequest
from asyncmem.lazy import np

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

    from asyncmem.devices.base import Segment
    from asyncmem.devices.metal.api import MTLBuffer, MTLCommandBuffer, MTLDevice

P = ParamSpec("P")
T = TypeVar("T")

_PACKAGE: Final = f"On macOS: pip install 'asyncmem[metal]'. {INSTEAD}"
_NO_CODE: Final = 0
_SHARED: Final = 0  # `MTLResourceStorageModeShared`: memory that host and device both address


def load(device: str) -> tuple[ModuleType, ModuleType]:
    """Import PyObjC's `Metal` and `objc` (blocks).

    Raises:
        BackendUnavailable: They are not installed, or this is no macOS.
    """
    try:
        import Metal
        import objc
    except ImportError as error:
        tried = f"PyObjC: {error}" if sys.platform == "darwin" else f"PyObjC, which is for macOS: {error}"
        raise BackendUnavailable(device, tried=(tried,), install=_PACKAGE) from None
    return Metal, objc


def find_devices(device: str) -> list[MTLDevice]:
    """List the GPUs of this machine, the system's first choice first (blocks).

    Raises:
        BackendUnavailable: There is no PyObjC.
    """
    metal, objc = load(device)
    with objc.autorelease_pool():
        first = metal.MTLCreateSystemDefaultDevice()
        chosen = first.registryID() if first is not None else None
        return sorted(metal.MTLCopyAllDevices(), key=lambda one: bool(one.registryID() != chosen))


def find_device(device: str, index: int) -> MTLDevice:
    """Return the device of that number.

    Raises:
        BackendUnavailable: There is none.
    """
    found = find_devices(device)
    if index >= len(found):
        tried = f"Metal: it has {names_of('metal', len(found))}"
        raise BackendUnavailable(device, tried=(tried,), install=INSTEAD)
    return found[index]


class Driver:
    """Metal as one device calls it.

    Attributes:
        objc: PyObjC's core.
        calls: How many calls there have been.
    """

    def __init__(self, device: str) -> None:
        """Serve the device of that name."""
        self.device = device
        _, self.objc = load(device)
        self.calls = 0
        self._retained: dict[str, bool] = {}

    def pool(self) -> AbstractContextManager[None]:
        """Return what releases temporary objects at its end: threads of Python's have nothing else that does."""
        pool: AbstractContextManager[None] = self.objc.autorelease_pool()
        return pool

    def call(self, method: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Make one call.

        Raises:
            DeviceError: It fails.
        """
        self.calls += 1
        try:
            return method(*args, **kwargs)
        except self.objc.error as error:
            raise self.failure(method.__name__, _NO_CODE, str(error)) from None

    def get(self, method: Callable[P, T | None], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Make one call that returns an object.

        Raises:
            DeviceError: It fails, or returns none.
        """
        return self._need(method, self.call(method, *args, **kwargs))

    def make(self, method: Callable[P, T | None], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a method that makes a new object, and own that once.

        Raises:
            DeviceError: It fails, or makes none.
        """
        return self._need(method, self.make_if_possible(method, *args, **kwargs))

    def _need(self, method: Callable[P, T | None], found: T | None) -> T:
        if found is None:
            raise self.failure(method.__name__, _NO_CODE, "it returns nil")
        return found

    def make_if_possible(self, method: Callable[P, T | None], /, *args: P.args, **kwargs: P.kwargs) -> T | None:
        """Call a method that makes a new object, and own that once; None where it makes none.

        Such an object comes with a reference that its caller owns. PyObjC up to 12.2.2 takes that for another owner's
        and adds its own (its issue 690), so that nothing would ever be freed.

        Raises:
            DeviceError: It fails.
        """
        with self.pool():
            made = self.call(method, *args, **kwargs)
            if made is not None and not self._is_retained(method):
                made.release()  # type: ignore[attr-defined]  # every object of Objective-C has that
            return made

    def failure(self, call: str, code: int, words: str) -> DeviceError:
        """Make an error."""
        return DeviceError(call, code=code, code_name=words, device=self.device)

    def failure_of(self, work: MTLCommandBuffer) -> DeviceError:
        """Make the error for work that has failed."""
        with self.pool():
            error = work.error()
            if error is None:
                return self.failure("MTLCommandBuffer", _NO_CODE, "no reason is given")
            return self.failure("MTLCommandBuffer", int(error.code()), str(error.localizedDescription()))

    def _is_retained(self, method: Callable[P, object]) -> bool:
        name = method.__name__
        if name not in self._retained:
            answer = method.__metadata__()["retval"]  # type: ignore[attr-defined]  # every method of PyObjC has that
            self._retained[name] = bool(answer.get("already_retained", False))
        return self._retained[name]


class PhysicalDevice(SegmentSpace[Driver]):
    """A device and its buffers, which outlive their callers."""

    def __init__(self, gpu: MTLDevice) -> None:
        """Begin without buffers. Made by `find_physical`."""
        super().__init__(int(gpu.maxBufferLength()))
        self.gpu = gpu
        self.unified = bool(gpu.hasUnifiedMemory())
        self.total = int(gpu.recommendedMaxWorkingSetSize())

    def free(self) -> int:
        """Return what this process has not taken, and no more than the host has free (reads files).

        Metal would give more than the device can use at a time, and whatever uses that fails.
        """
        return min(max(0, self.total - int(self.gpu.currentAllocatedSize())), host_memory().free)

    def get(self, driver: Driver, nbytes: int) -> tuple[int, object] | None:
        """Get a buffer (blocks), which is freed once nothing refers to it; None where Metal has too little."""
        with driver.pool():
            buffer = driver.make_if_possible(self.gpu.newBufferWithLength_options_, nbytes, _SHARED)
            if buffer is None:
                return None
            start = int(np.frombuffer(buffer.contents().as_buffer(nbytes), np.uint8).ctypes.data)
            return start, [(buffer, start)]

    def put_back(self, driver: Driver, segment: Segment) -> None:
        """Release a buffer; work that still uses it keeps it until then."""
        driver.calls += 1
        with driver.pool():
            cast("list[object]", segment.token).clear()

    def buffer_of(self, address: int, nbytes: int) -> tuple[MTLBuffer, int]:
        """Return the buffer in which a range lies, and where in it.

        Raises:
            InvalidRequest: It lies in none, or not as a whole.
        """
        segment = self.find(address, nbytes)
        held = cast("list[tuple[MTLBuffer, int]]", segment.token if segment is not None else [])
        for buffer, start in held:
            return buffer, address - start
        raise InvalidRequest("address", hex(address), f"{nbytes} bytes within one segment of the device")


_physical_devices: dict[int, PhysicalDevice] = {}
_lock: Final = threading.RLock()


def find_physical(driver: Driver, index: int) -> PhysicalDevice:
    """Return the device of that number, with what this process has of it (blocks).

    Raises:
        BackendUnavailable: There is none, or it cannot be used.
    """
    gpu = find_device(driver.device, index)
    with _lock:
        return _physical_devices.setdefault(int(gpu.registryID()), PhysicalDevice(gpu))
