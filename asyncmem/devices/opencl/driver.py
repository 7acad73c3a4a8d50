"""pyopencl: finding it and its devices, calling it, errors that say what to do, and shared virtual memory.

It takes long to import and starts every driver that is installed, so that happens only once a device is asked for.

Sub-buffers would do without shared virtual memory, but two that overlap may not be used at the same time, and they
begin where the device likes it: a pool puts blocks anywhere, and works on the bytes of one while kernels work on the
next.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Final, ParamSpec, TypeVar

from asyncmem.devices.base import INSTEAD, Segment, whole_segment
from asyncmem.devices.host_memory import PAGE, host_memory, total_memory
from asyncmem.devices.queue_device import SegmentBook
from asyncmem.errors import BackendUnavailable, DeviceError, OutOfMemoryError
from asyncmem.facts import OutOfMemoryFacts

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

    import pyopencl as cl

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
            raise error_of(error, device) from None
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
        there = f"opencl:0 to opencl:{len(found) - 1}" if len(found) > 1 else "opencl:0" if found else "no device"
        raise BackendUnavailable(device, tried=(f"the OpenCL drivers: they have {there}",), install=_DRIVER)
    one = found[index]
    if not shares_memory(one):
        lack = f"{one.name.strip()}: it has no shared virtual memory, which is of OpenCL 2.0"
        raise BackendUnavailable(device, tried=(lack,), install=INSTEAD)
    return one


def is_processor(device: cl.Device) -> bool:
    """Return whether a device is the host's own processor, whose memory is the host's."""
    return bool(device.type & load("opencl").device_type.CPU)


def shares_memory(device: cl.Device, *, finely: bool = False) -> bool:
    """Return whether segments can be had that kernels know by address; `finely`: which the host may touch, too."""
    cl = load("opencl")
    kinds = cl.device_svm_capabilities
    wanted = kinds.FINE_GRAIN_BUFFER if finely else kinds.COARSE_GRAIN_BUFFER
    try:
        return bool(device.svm_capabilities & wanted)
    except cl.Error:
        return False  # the question is of OpenCL 2.0 as well


def error_of(error: cl.Error, device: str) -> DeviceError:
    """Make the error for one of pyopencl's."""
    return failure(error.routine, error.code, device)


def failure(call: str, code: int, device: str) -> DeviceError:
    """Make the error for a code of OpenCL's."""
    return DeviceError(call, code=code, code_name=f"CL_{load(device).status_code.to_string(code)}", device=device)


class Driver:
    """OpenCL as one device calls it.

    Attributes:
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
            raise error_of(error, self.device) from None

    def failure(self, call: str, code: int) -> DeviceError:
        """Make the error for a code."""
        return failure(call, code, self.device)

    def allocate(self, context: cl.Context, nbytes: int, flags: int, free: int) -> cl.SVMAllocation:
        """Get memory that has an address.

        Raises:
            OutOfMemoryError: The driver has too little; `free` is what was thought to be there.
            DeviceError: It fails otherwise.
        """
        try:
            allocation: cl.SVMAllocation = self.call(self.cl.SVMAllocation, context, nbytes, 0, flags)
        except DeviceError as error:
            if error.code not in _TOO_MUCH:
                raise
            facts = OutOfMemoryFacts(asked=nbytes, device=self.device, device_free=free)
            raise OutOfMemoryError(facts) from None
        return allocation


class Ledger:
    """Counts what is taken of so many bytes."""

    def __init__(self, total: int, *, on_host: bool) -> None:
        """Begin with none taken; memory `on_host` is shared with everybody there."""
        self.total = total
        self._on_host = on_host
        self._taken = 0
        # Re-entrant: a finalizer may interrupt the holder on the same thread and give back.
        self._lock: Final = threading.RLock()

    def free(self) -> int:
        """Return the bytes that could still be taken (reads files, on the host)."""
        left = max(0, self.total - self._taken)
        return min(left, host_memory().free) if self._on_host else left

    def take(self, nbytes: int, device: str) -> int:
        """Count bytes that are about to be got, and return how many are free beside them.

        Raises:
            OutOfMemoryError: There are too few.
        """
        with self._lock:
            free = self.free()
            if nbytes > free:
                raise OutOfMemoryError(OutOfMemoryFacts(asked=nbytes, device=device, device_free=free))
            self._taken += nbytes
            return free - nbytes

    def give_back(self, nbytes: int) -> None:
        """Count bytes that are no longer there, or were not got."""
        with self._lock:
            self._taken -= nbytes


class PhysicalDevice:
    """A device and its context, made once in a process: addresses and events mean nothing in another context."""

    def __init__(self, driver: Driver, device: cl.Device) -> None:
        """Make the context. Get it by `find_physical`."""
        self.device = device
        self.context: cl.Context = driver.call(driver.cl.Context, [device])
        self.on_host = is_processor(device)
        self.ledger = Ledger(int(device.global_mem_size), on_host=self.on_host)
        self.host_ledger = Ledger(total_memory(), on_host=True)
        self.most = int(device.max_mem_alloc_size)
        self.has_pinned = shares_memory(device, finely=True)


_physical_devices: dict[int, PhysicalDevice] = {}
_lock: Final = threading.RLock()


def find_physical(driver: Driver, index: int) -> PhysicalDevice:
    """Return the device of that number, with the context that it has in this process (blocks).

    Raises:
        BackendUnavailable: It cannot be had.
        DeviceError: The driver fails.
    """
    device = find_device(driver.device, index)
    with _lock:
        known = _physical_devices.get(device.int_ptr)
        if known is None:
            known = _physical_devices[device.int_ptr] = PhysicalDevice(driver, device)
        return known


# An allocation that is dropped is freed, and one whose device is forgotten may still be in use.
_out: Final[dict[int, cl.SVMAllocation]] = {}


class Segments:
    """Gets segments of one kind of memory, counted in a ledger, and gives them back."""

    def __init__(
        self, name: str, driver: Driver, physical: PhysicalDevice, kinds: tuple[str, ...], *, fine: bool = False
    ) -> None:
        """Serve the device of that name; `fine` segments may be read and written by the host at any time."""
        flags = driver.cl.svm_mem_flags
        self._book = SegmentBook(name)
        self._kinds = kinds
        self._driver = driver
        self._physical = physical
        self._flags = int(flags.READ_WRITE | (flags.SVM_FINE_GRAIN_BUFFER if fine else 0))
        self._ledger: Ledger = physical.host_ledger if fine else physical.ledger

    def take(self, nbytes: int, kind: str) -> Segment:
        """Get whole pages (blocks)."""
        nbytes, kind = whole_segment(nbytes, kind, self._kinds, PAGE)
        # The driver aligns to 128 bytes at most.
        whole = nbytes + PAGE
        if whole > self._physical.most:
            raise self._beyond(nbytes)
        free = self._ledger.take(whole, self._book.device)
        try:
            allocation = self._driver.allocate(self._physical.context, whole, self._flags, free)
        except BaseException:
            self._ledger.give_back(whole)
            raise
        address = -(-allocation.svm_ptr // PAGE) * PAGE
        segment = Segment(address, nbytes, kind, allocation)
        self._book.enlist(segment)
        _out[address] = allocation
        return segment

    def give_back(self, segment: Segment) -> None:
        """Free a segment (blocks); where the driver fails, it is still out."""
        self._book.withdraw(segment)
        allocation = _out.pop(segment.address)
        try:
            self._driver.call(allocation.release)
        except BaseException:
            self._book.enlist(segment)
            _out[segment.address] = allocation
            raise
        self._ledger.give_back(segment.nbytes + PAGE)

    def holds(self, address: int, nbytes: int) -> bool:
        """Return whether a range lies in one of the segments that are out."""
        return self._book.find(address, nbytes) is not None

    def _beyond(self, nbytes: int) -> OutOfMemoryError:
        advice = f"at most {self._physical.most >> 20} MiB in one piece, which is all that the driver gives out"
        free = self._ledger.free()
        return OutOfMemoryError(
            OutOfMemoryFacts(asked=nbytes, device=self._book.device, device_free=free, advice=(advice,))
        )
