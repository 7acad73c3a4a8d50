"""pyopencl: finding it and its devices, calling it, errors that say what to do, and shared virtual memory.

It takes long to import and starts every driver that is installed, so that happens only once a device is asked for.

Sub-buffers would do without shared virtual memory, but two that overlap may not be used at the same time, and they
begin where the device likes it: a pool puts blocks anywhere, and works on the bytes of one while kernels work on the
next.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Final, ParamSpec, TypeVar

from asyncmem.devices.base import INSTEAD, names_of
from asyncmem.devices.host_memory import PAGE, host_memory, total_memory
from asyncmem.devices.queues import SegmentSpace
from asyncmem.errors import BackendUnavailable, DeviceError

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

    import pyopencl as cl

    from asyncmem.devices.base import Segment

P = ParamSpec("P")
T = TypeVar("T")

_PACKAGE: Final = f"pip install 'asyncmem[opencl]'. {INSTEAD}"
_DRIVER: Final = (
    "Install the OpenCL driver of the device's vendor, or pip install 'asyncmem[pocl]', which makes one of the "
    f"processor. {INSTEAD}"
)

_NO_PLATFORM: Final = -1001  # what the loader says where no driver is installed
_TOO_MUCH: Final = frozenset({-4, -5, -6, -61})
"""Memory object allocation failure, out of resources, out of host memory, invalid buffer size."""


def load(device: str) -> ModuleType:
    """Import pyopencl (blocks).

    Raises:
        BackendUnavailable: It is not installed, or cannot be loaded.
    """
    try:
        import pyopencl
    except ImportError as error:
        raise BackendUnavailable(device, tried=(f"pyopencl: {error}",), install=_PACKAGE) from None
    module: ModuleType = pyopencl
    return module


def find_devices(device: str) -> list[cl.Device]:
    """List the devices of all drivers, processors last (blocks; the first call starts the drivers).

    Raises:
        BackendUnavailable: There is no pyopencl, or no driver.
        DeviceError: A driver fails.
    """
    cl = load(device)
    try:
        found = [one for platform in cl.get_platforms() for one in platform.get_devices()]
    except cl.Error as error:
        if error.code != _NO_PLATFORM:
            raise failure(error.routine, error.code, device) from None
        raise BackendUnavailable(device, tried=("the OpenCL loader: it finds no driver",), install=_DRIVER) from None
    return sorted(found, key=is_processor)


def find_device(device: str, index: int) -> cl.Device:
    """Return the device of that number.

    Raises:
        BackendUnavailable: There is none, or it has no memory with addresses.
        DeviceError: A driver fails.
    """
    found = find_devices(device)
    if index >= len(found):
        tried = f"the OpenCL drivers: they have {names_of('opencl', len(found))}"
        raise BackendUnavailable(device, tried=(tried,), install=_DRIVER)
    one = found[index]
    if not shares_memory(one):
        lack = f"{one.name.strip()}: it has no shared virtual memory, which is of OpenCL 2.0"
        raise BackendUnavailable(device, tried=(lack,), install=INSTEAD)
    return one


def is_processor(device: cl.Device) -> bool:
    """Return whether a device is the host's own processor, whose memory is the host's."""
    return bool(device.type & load("opencl").device_type.CPU)


def shares_memory(device: cl.Device, *, finely: bool = False) -> bool:
    """Return whether there are segments that kernels know by address; `finely`: which the host may touch, too."""
    cl = load("opencl")
    kinds = cl.device_svm_capabilities
    wanted = kinds.FINE_GRAIN_BUFFER if finely else kinds.COARSE_GRAIN_BUFFER
    try:
        return bool(device.svm_capabilities & wanted)
    except cl.Error:
        return False  # the question is of OpenCL 2.0 as well


def failure(call: str, code: int, device: str) -> DeviceError:
    """Make the error for a code of OpenCL's."""
    return DeviceError(call, code=code, code_name=f"CL_{load(device).status_code.to_string(code)}", device=device)


class Driver:
    """OpenCL as one device calls it.

    Attributes:
        device: The name of the device.
        cl: The package.
        calls: How many calls there have been.
    """

    def __init__(self, device: str) -> None:
        """Serve the device of that name."""
        self.device = device
        self.cl = load(device)
        self.calls = 0

    def call(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Make one call.

        Raises:
            DeviceError: It fails.
        """
        self.calls += 1
        try:
            return function(*args, **kwargs)
        except self.cl.Error as error:
            raise failure(error.routine, error.code, self.device) from None


class SharedMemory(SegmentSpace[Driver]):
    """Shared virtual memory, counted here: no driver counts it, and some give out more than there is."""

    def __init__(self, physical: PhysicalDevice, cl: ModuleType, total: int, *, fine: bool) -> None:
        """Begin with none taken; `fine` memory, of the host, may be read and written by the host at any time."""
        super().__init__(int(physical.device.max_mem_alloc_size))
        self.total = total
        self.taken = 0
        self._context = physical.context
        self._on_host = fine or physical.on_host  # and is shared with all processes there
        flags = cl.svm_mem_flags
        self._flags = int(flags.READ_WRITE | (flags.SVM_FINE_GRAIN_BUFFER if fine else 0))

    def free(self) -> int:
        """Return the bytes that could still be taken (reads files, on the host)."""
        left = max(0, self.total - self.taken)
        return min(left, host_memory().free) if self._on_host else left

    def get(self, driver: Driver, nbytes: int) -> tuple[int, object] | None:
        """Get memory (blocks); None where the driver has too little."""
        try:
            allocation = driver.call(driver.cl.SVMAllocation, self._context, nbytes, 0, self._flags)
        except DeviceError as error:
            if error.code not in _TOO_MUCH:
                raise
            return None
        self.taken += nbytes
        return allocation.svm_ptr, allocation

    def put_back(self, driver: Driver, segment: Segment) -> None:
        """Give memory back (blocks)."""
        allocation: cl.SVMAllocation = segment.token  # type: ignore[assignment]  # as `get` made it
        driver.call(allocation.release)
        self.taken -= segment.nbytes + PAGE


class PhysicalDevice:
    """A device and its context, made once in a process: addresses and events mean nothing in another context.

    It keeps the segments: one that is dropped would be freed, and one whose device is forgotten may still be in use.
    """

    def __init__(self, driver: Driver, device: cl.Device) -> None:
        """Make the context. Get it by `find_physical`."""
        self.device = device
        self.context: cl.Context = driver.call(driver.cl.Context, [device])
        self.on_host = is_processor(device)
        self.memory = SharedMemory(self, driver.cl, int(device.global_mem_size), fine=False)
        self.pinned: SharedMemory | None = None
        if shares_memory(device, finely=True):
            self.pinned = SharedMemory(self, driver.cl, total_memory(), fine=True)


_physical_devices: dict[int, PhysicalDevice] = {}
_lock: Final = threading.RLock()


def find_physical(driver: Driver, index: int) -> PhysicalDevice:
    """Return the device of that number, with the context that it has in this process (blocks).

    Raises:
        BackendUnavailable: There is none, or it cannot be used.
        DeviceError: The driver fails.
    """
    device = find_device(driver.device, index)
    with _lock:
        known = _physical_devices.get(device.int_ptr)
        if known is None:
            known = _physical_devices[device.int_ptr] = PhysicalDevice(driver, device)
        return known
