"""pyopencl: finding it and its devices, calling it, and errors that say what to do.

It takes long to import and starts every driver that is installed, so that happens only once a device is asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, ParamSpec, TypeVar

from asyncmem.errors import BackendUnavailable, DeviceError, OutOfMemoryError
from asyncmem.facts import OutOfMemoryFacts

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

    import pyopencl as cl

P = ParamSpec("P")
T = TypeVar("T")

_INSTEAD: Final = "Use 'host' for real memory on this machine, or 'simulated' to test GPU code without a GPU"
_PACKAGE: Final = f"pip install 'asyncmem[opencl]'. {_INSTEAD}"
_DRIVER: Final = (
    "Install the OpenCL driver of the device's vendor, or pip install 'asyncmem[pocl]', which makes one of the "
    f"processor. {_INSTEAD}"
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
        raise BackendUnavailable(device, tried=(lack,), install=_INSTEAD)
    return one


def is_processor(device: cl.Device) -> bool:
    """Tell whether a device is the host's own processor, whose memory is the host's."""
    return bool(device.type & load("opencl").device_type.CPU)


def shares_memory(device: cl.Device, *, finely: bool = False) -> bool:
    """Tell whether segments can be had that kernels know by address; `finely`: which the host may touch, too."""
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
