"""The driver: starting it, calling it by name through `cuda.bindings`, and errors that say what to do.

`cuda.bindings` has no types worth the name and takes long to import, so it is met here and nowhere else, and only once
a device is asked for. The hot calls go another way, through the function pointers of `_calls`.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Final

from asyncmem.errors import BackendUnavailable, DeviceError, OutOfMemoryError
from asyncmem.facts import OutOfMemoryFacts

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import ModuleType

OLDEST: Final = 12_040

INVALID_VALUE: Final = 1
OUT_OF_MEMORY: Final = 2
NOT_INITIALIZED: Final = 3
DEINITIALIZED: Final = 4
INVALID_HANDLE: Final = 400
NOT_FOUND: Final = 500
PEER_ACCESS_ALREADY_ENABLED: Final = 704

_INSTEAD: Final = "Use 'host' for real memory on this machine, or 'simulated' to test GPU code without a GPU"
_UPDATE: Final = f"Install an NVIDIA driver for CUDA {OLDEST // 1000}.{OLDEST % 1000 // 10} or later (R550). {_INSTEAD}"

# Codes of cuInit that mean a machine on which nothing can be had, and not one where something broke.
_USELESS: Final = {
    34: "the driver is a stub to link with: a directory of stubs is on the library path",
    35: "the installed driver is too old",
    100: "the driver sees no GPU",
    803: "the driver and its kernel module are of different versions: a reboot loads the newer one",
    804: "this GPU cannot run the compatibility driver that is installed",
}
_NAMES: Final = {NOT_INITIALIZED: "CUDA_ERROR_NOT_INITIALIZED", DEINITIALIZED: "CUDA_ERROR_DEINITIALIZED"}
"""Names of the codes that are made here, where the driver cannot be asked."""

_LOST_CODES: Final = (214, 700, 702, 710, 714, 715, 716, 717, 718, 719, 999)
ENDED: Final = frozenset({4, 201, 709, *_LOST_CODES})
"""Codes that say that the context, and all that was in it, is no more."""
_LOST: Final = (
    "The GPU's context is lost, and with it everything in it, until the process is started anew. A kernel did this: "
    "run under compute-sanitizer, or with CUDA_LAUNCH_BLOCKING=1, to see which"
)
_CAPTURE: Final = "A graph is being captured: use a capturing stream's memory within pool.graph() only"
_ADVICE: Final = {
    NOT_INITIALIZED: "This process was forked from one that uses the GPU; start workers with the method 'spawn'",
    DEINITIALIZED: (
        "Its device is closed, the interpreter is ending, or this process was forked from one that uses the GPU; "
        "start workers with the method 'spawn'"
    ),
    46: "Another process has the GPU for itself: see its compute mode in nvidia-smi",
    201: "Somebody has reset the device or destroyed its context",
    **dict.fromkeys(_LOST_CODES, _LOST),
    NOT_FOUND: "The driver is older than what this needs; install a newer one",
    709: "Somebody has reset the device or destroyed its context",
    **dict.fromkeys(range(900, 910), _CAPTURE),
}


def start(device: str) -> None:
    """Load and start the driver (blocks; the first time in a machine's life for seconds).

    Raises:
        BackendUnavailable: There is no driver, or one that is too old, or no GPU for it.
        DeviceError: The driver is there and fails.
    """
    try:
        from asyncmem.devices.cuda import _calls
    except ImportError as error:
        raise BackendUnavailable(device, tried=(f"the compiled part of asyncmem: {error}",), install=_INSTEAD) from None
    missing = _calls.load()
    if missing:
        raise BackendUnavailable(device, tried=(missing,), install=_UPDATE)
    version = _calls.version()
    if 0 < version < OLDEST:
        found = f"the installed driver, which is for CUDA {version // 1000}.{version % 1000 // 10}"
        raise BackendUnavailable(device, tried=(found,), install=_UPDATE)
    code = _calls.start()
    if code in _USELESS:
        raise BackendUnavailable(device, tried=(f"cuInit: {_USELESS[code]}", *_hidden()), install=_INSTEAD)
    if code:
        raise error_of("cuInit", code, device)


def count_devices() -> int:
    """Start the driver, and answer how many devices it shows (blocks).

    Raises:
        BackendUnavailable: There is no driver, or one that is too old, or no GPU for it.
        DeviceError: The driver fails.
    """
    start("cuda")
    return _count("cuda")


def _count(device: str) -> int:
    from asyncmem.devices.cuda import _calls

    count = _calls.device_count()
    if count < 0:
        raise error_of("cuDeviceGetCount", -count, device)
    return count


def check_index(device: str, index: int) -> None:
    """See that the started driver has a device of that number.

    Raises:
        BackendUnavailable: It has fewer.
        DeviceError: The driver fails.
    """
    count = _count(device)
    if index >= count:
        there = "no GPU" if count == 0 else f"only cuda:0 to cuda:{count - 1}" if count > 1 else "only cuda:0"
        raise BackendUnavailable(device, tried=(f"the driver: it shows {there}", *_hidden()), install=_INSTEAD)


def _hidden() -> tuple[str, ...]:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return () if visible is None else (f"CUDA_VISIBLE_DEVICES is {visible!r}, which hides all others",)


def error_of(call: str, code: int, device: str) -> DeviceError:
    """Make the error for a driver's code."""
    from asyncmem.devices.cuda import _calls

    name = _calls.error_name(code) or _NAMES.get(code, "unknown")
    return DeviceError(call, code=code, code_name=name, device=device, advice=_ADVICE.get(code, ""))


class Driver:
    """The driver as one device calls it. Whoever calls makes the context current before.

    Attributes:
        calls: How many calls there have been.
        gone: Whether no call may be made any more: the interpreter is ending, or this is a forked child. Kept here,
            for whoever is dropped at the very end can import nothing.
    """

    def __init__(self, device: str) -> None:
        """Serve the device of that name, once the driver is started.

        Raises:
            BackendUnavailable: The Python package of the driver cannot be imported.
        """
        from asyncmem.devices.cuda import _calls

        self.calls = 0
        self.gone = _calls.gone
        self._device = device
        self._bindings = _import_bindings(device)

    def call(self, function: str, *arguments: object, asked: int = 0) -> Any:  # noqa: ANN401  # the package has no types
        """Make one call and return what it answers beside its code: a value, several, or None.

        Args:
            function: The name, without a version.
            arguments: As `cuda.bindings` takes them.
            asked: The bytes that the caller wants, where there may be too few.

        Raises:
            OutOfMemoryError: The driver has too little memory for what was asked.
            DeviceError: It fails, or may not be called any more.
        """
        if self.gone():
            raise self.error(function, DEINITIALIZED)
        self.calls += 1
        try:
            code, *values = getattr(self._bindings, function)(*arguments)
        except RuntimeError:  # what the package raises for a function that the driver has not
            raise self.error(function, NOT_FOUND) from None
        # Without a wish this says that the driver lacks memory of its own: who gives back cannot be out of memory.
        if code == OUT_OF_MEMORY and asked:
            raise self.out_of_memory(asked)
        if code:
            raise self.error(function, int(code))
        return None if not values else values[0] if len(values) == 1 else tuple(values)

    def error(self, call: str, code: int) -> DeviceError:
        """Make the error for a code."""
        return error_of(call, code, self._device)

    def out_of_memory(self, asked: int) -> OutOfMemoryError:
        """Make the error for bytes that the driver has not, with what it has."""
        code, *found = self._bindings.cuMemGetInfo()
        free = None if code else int(found[0])
        return OutOfMemoryError(OutOfMemoryFacts(asked=asked, device=self._device, device_free=free))

    def attribute(self, name: str, device: int) -> int:
        """Ask for a device's attribute; what this package does not know, no device has."""
        known = getattr(self._bindings.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}", None)
        return 0 if known is None else int(self.call("cuDeviceGetAttribute", known, device))

    def enumerator(self, enumeration: str, name: str) -> object:
        """Return one of the driver's named numbers: ("CUmemPool_attribute", "RELEASE_THRESHOLD")."""
        prefix = {"CUmemPool_attribute": "CU_MEMPOOL_ATTR_", "CUpointer_attribute": "CU_POINTER_ATTRIBUTE_"}
        return getattr(getattr(self._bindings, enumeration), prefix[enumeration] + name)

    def number(self, value: int) -> object:
        """Return what the driver takes as a 64-bit number by address."""
        return self._bindings.cuuint64_t(value)

    def allocation(self, device: int) -> object:
        """Describe physical memory of a device."""
        properties = self._bindings.CUmemAllocationProp()
        properties.type = self._bindings.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.location = self._location(device)
        return properties

    def memory_pool(self, device: int) -> object:
        """Describe a memory pool of the driver's on a device."""
        properties = self._bindings.CUmemPoolProps()
        properties.allocType = self._bindings.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.location = self._location(device)
        return properties

    def granularity(self, device: int) -> int:
        """Ask for the unit of physical memory, in bytes."""
        least = self._bindings.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        return int(self.call("cuMemGetAllocationGranularity", self.allocation(device), least))

    def access(self, devices: Sequence[int], *, allowed: bool = True) -> list[object]:
        """Describe who may read and write, or may no longer."""
        flags = self._bindings.CUmemAccess_flags
        descriptions = []
        for device in devices:
            one = self._bindings.CUmemAccessDesc()
            one.location = self._location(device)
            one.flags = flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE if allowed else flags.CU_MEM_ACCESS_FLAGS_PROT_NONE
            descriptions.append(one)
        return descriptions

    def _location(self, device: int) -> object:
        location = self._bindings.CUmemLocation()
        location.type = self._bindings.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        location.id = device
        return location


def _import_bindings(device: str) -> ModuleType:
    try:
        from cuda.bindings import driver  # type: ignore[import-untyped]  # it ships without types
    except ImportError as error:
        raise BackendUnavailable(
            device, tried=(f"cuda.bindings: {error}",), install=f"pip install cuda-python. {_INSTEAD}"
        ) from None
    module: ModuleType = driver
    return module
