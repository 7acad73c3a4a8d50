"""A vendor's driver: once for all its devices (the class), and as one device calls it by name (an object).

CUDA's and HIP's are one interface under two sets of names, with the same numbers for errors. So all is named here as
CUDA names it, and each vendor says what is different about it. The vendors' Python packages have no types worth the
name and take long to import, so that happens only once a device is asked for. The hot calls go another way, through the
function pointers of `_calls`.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from operator import attrgetter
from typing import TYPE_CHECKING, Any, ClassVar, Final

from asyncmem.devices.base import INSTEAD, names_of
from asyncmem.errors import BackendUnavailable, DeviceError, OutOfMemoryError
from asyncmem.facts import OutOfMemoryFacts

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from types import ModuleType

    from asyncmem.devices.gpu._calls import Context, Library

INVALID_VALUE: Final = 1
OUT_OF_MEMORY: Final = 2
NOT_INITIALIZED: Final = 3
DEINITIALIZED: Final = 4
INVALID_CONTEXT: Final = 201
INVALID_HANDLE: Final = 400
NOT_FOUND: Final = 500
PEER_ACCESS_ALREADY_ENABLED: Final = 704
CONTEXT_IS_DESTROYED: Final = 709

LOST_CODES: Final = (214, 700, 702, 710, 714, 715, 716, 717, 718, 719, 999)
ENDED: Final = frozenset({DEINITIALIZED, INVALID_CONTEXT, CONTEXT_IS_DESTROYED, *LOST_CODES})
"""Codes that say that the context, and all that was in it, is no more."""

_PINNED: Final = "CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED"
_KEEP_ALL: Final = (1 << 64) - 1

_FORKED: Final = "process was forked from one that uses the GPU; start workers with the method 'spawn'"
COMMON_ADVICE: Final = {
    NOT_INITIALIZED: f"This {_FORKED}",
    DEINITIALIZED: f"Its device is closed, the interpreter is ending, or this {_FORKED}",
    INVALID_CONTEXT: "The device was reset, or its context destroyed",
    CONTEXT_IS_DESTROYED: "The device was reset, or its context destroyed",
    **dict.fromkeys(
        range(900, 910), "A graph is being captured: use a capturing stream's memory within pool.graph() only"
    ),
}
"""What to do about a code."""


class Driver(ABC):
    """A driver. What is asked of the class is asked after `start`; before a call, the caller makes the context current.

    Attributes:
        calls: How many calls there have been.
        gone: Whether no call may be made any more: the interpreter is ending, or this is a forked child. Kept here,
            for what is dropped at the very end can import nothing.
    """

    kind: ClassVar[str]
    """What its devices are called: "cuda"."""
    name: ClassVar[str]
    """What it is called itself."""
    install: ClassVar[str]
    """What to install where it is not there, or too old."""
    oldest: ClassVar[int]
    """The oldest version that can be used."""
    selectors: ClassVar[Sequence[str]]
    """Environment variables that choose devices, and hide all others."""
    useless: ClassVar[Mapping[int, str]]
    """Codes of the first call that mean a machine without a usable GPU, and not one where something broke."""
    advice: ClassVar[Mapping[int, str]]
    """What to do about a code."""
    names: ClassVar[Mapping[int, str]]
    """Names of the codes that are made here, where the driver cannot be asked."""
    joins_mappings: ClassVar[bool]
    """Whether one call may unmap, or set the access of, several mappings that lie side by side."""
    has_checkers: ClassVar[bool]
    """Whether there are memory checkers for its devices."""
    library: ClassVar[Library]
    """The driver's functions."""

    def __init__(self, device: str) -> None:
        """Serve the device of that name, once the driver is started.

        Raises:
            BackendUnavailable: The Python package of the driver cannot be imported.
        """
        from asyncmem.devices.gpu import _calls

        self.calls = 0
        self.gone = _calls.gone
        self._device = device
        self._bindings = self.import_bindings(device)
        self._functions: dict[str, Callable[..., Any]] = {}

    @classmethod
    @abstractmethod
    def load(cls, library: Library, device: str) -> str:
        """Load the driver, for a device of that name; return why that is not possible, or an empty string."""

    @staticmethod
    @abstractmethod
    def version_text(version: int) -> str:
        """Name what is installed, by its version."""

    @staticmethod
    def symbol(name: str) -> str:
        """Return the driver's own name for a call, a type or a constant."""
        return name

    @abstractmethod
    def import_bindings(self, device: str) -> ModuleType:
        """Import the vendor's package for a device of that name."""

    @classmethod
    def start(cls, device: str) -> None:
        """Load and start the driver (blocks; the first time in a machine's life for seconds).

        Raises:
            BackendUnavailable: There is no driver, or one that is too old, or no GPU for it.
            DeviceError: The driver is there and fails.
        """
        try:
            from asyncmem.devices.gpu._calls import Library
        except ImportError as error:
            missing = f"the compiled part of asyncmem: {error}"
            raise BackendUnavailable(device, tried=(missing,), install=INSTEAD) from None
        library = Library()
        missing = cls.load(library, device)
        if not missing and 0 < library.version() < cls.oldest:
            missing = cls.version_text(library.version())
        if missing:
            raise BackendUnavailable(device, tried=(missing,), install=cls.install)
        cls.library = library
        code = library.start()
        if code in cls.useless:
            tried = (f"{cls.symbol('cuInit')}: {cls.useless[code]}", *cls._hidden())
            raise BackendUnavailable(device, tried=tried, install=INSTEAD)
        if code:
            raise cls.error_of("cuInit", code, device)

    @classmethod
    def count_devices(cls) -> int:
        """Start the driver, and return how many devices it shows (blocks).

        Raises:
            BackendUnavailable: There is no driver, or one that is too old, or no GPU for it.
            DeviceError: The driver fails.
        """
        cls.start(cls.kind)
        return cls._count(cls.kind)

    @classmethod
    def check_index(cls, device: str, index: int) -> None:
        """Raise unless the started driver has a device of that number.

        Raises:
            BackendUnavailable: It has fewer.
            DeviceError: The driver fails.
        """
        count = cls._count(device)
        if index >= count:
            there = f"only {names_of(cls.kind, count)}" if count else "no GPU"
            tried = (f"the driver: it shows {there}", *cls._hidden())
            raise BackendUnavailable(device, tried=tried, install=INSTEAD)

    @classmethod
    def error_of(cls, call: str, code: int, device: str) -> DeviceError:
        """Make the error for a driver's code."""
        name = cls.library.error_name(code) or cls.names.get(code, "unknown")
        # It is reported here, so no other library on this thread is to take it for an error of its own.
        cls.library.forget_error()
        return DeviceError(cls.symbol(call), code=code, code_name=name, device=device, advice=cls.advice.get(code, ""))

    @classmethod
    def _hidden(cls) -> tuple[str, ...]:
        found = ((one, os.environ.get(one)) for one in cls.selectors)
        return tuple(f"{one} is {value!r}, which hides all others" for one, value in found if value is not None)

    @classmethod
    def _count(cls, device: str) -> int:
        count = cls.library.device_count()
        if count < 0:
            raise cls.error_of("cuDeviceGetCount", -count, device)
        return count

    def call(self, function: str, *arguments: object, asked: int = 0) -> Any:  # noqa: ANN401  # the package has no types
        """Make one call and return what it returns beside its code: a value, several, or None.

        Args:
            function: CUDA's name for it, without a version.
            arguments: As the vendor's package takes them.
            asked: The bytes that the caller wants, where there may be too few.

        Raises:
            OutOfMemoryError: The driver has too little memory for what was asked.
            DeviceError: It fails, or may not be called any more.
        """
        if self.gone():
            raise self.error(function, DEINITIALIZED)
        self.calls += 1
        try:
            code, *values = (self._functions.get(function) or self._find(function))(*arguments)
        except RuntimeError:  # what the packages raise for a function that the driver has not
            raise self.error(function, NOT_FOUND) from None
        # Without a wish this says that the driver lacks memory of its own: who gives back cannot be out of memory.
        if code == OUT_OF_MEMORY and asked:
            raise self.out_of_memory(asked)
        if code:
            raise self.error(function, int(code))
        return None if not values else values[0] if len(values) == 1 else tuple(values)

    def error(self, call: str, code: int) -> DeviceError:
        """Make the error for a code."""
        return self.error_of(call, code, self._device)

    def out_of_memory(self, asked: int) -> OutOfMemoryError:
        """Make the error for bytes that the driver has not, with what it has."""
        self.library.forget_error()
        code, *found = self._find("cuMemGetInfo")()
        free = None if code else int(found[0])
        return OutOfMemoryError(OutOfMemoryFacts(asked=asked, device=self._device, device_free=free))

    def _find(self, function: str) -> Callable[..., Any]:
        found: Callable[..., Any] = self._known(function)
        self._functions[function] = found
        return found

    @abstractmethod
    def known_attribute(self, name: str, address: int) -> int:
        """Ask for an attribute of memory at an address: "MEMORY_TYPE", "DEVICE_ORDINAL".

        Raises:
            DeviceError: The driver fails, or knows nothing of that memory.
        """

    @abstractmethod
    def attribute(self, name: str, device: int) -> int:
        """Ask for a device's attribute, by CUDA's name; what the package does not know, no device has."""

    @abstractmethod
    def set_threshold(self, pool: object, attribute: object, nbytes: int) -> None:
        """Set how much a memory pool keeps."""

    @abstractmethod
    def home(self, context: Context) -> object:
        """Return how calls between two devices name the one that a context is of."""

    def granularity(self, device: int) -> int:
        """Ask for the unit of physical memory, in bytes."""
        properties = self._known("CUmemAllocationProp")()
        properties.type = self._known(_PINNED)
        self.locate(properties.location, device)
        least = self._known("CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM")
        return int(self.call("cuMemGetAllocationGranularity", properties, least))

    def create_pool(self, device: int) -> object:
        """Make a memory pool of the driver's on a device, which keeps what is free until it is trimmed."""
        properties = self._known("CUmemPoolProps")()
        properties.allocType = self._known(_PINNED)
        self.locate(properties.location, device)
        pool: object = self.call("cuMemPoolCreate", properties)
        try:
            self.set_threshold(pool, self._known("CUmemPool_attribute.CU_MEMPOOL_ATTR_RELEASE_THRESHOLD"), _KEEP_ALL)
        except BaseException:
            self.call("cuMemPoolDestroy", pool)
            raise
        return pool

    def open_pool(self, pool: object, devices: Sequence[int], *, allowed: bool = True) -> None:
        """Let devices use all that a memory pool gives out, or no longer."""
        accesses = [self.access(device, allowed=allowed) for device in devices]
        self.call("cuMemPoolSetAccess", pool, accesses, len(accesses))

    def access(self, device: int, *, allowed: bool = True) -> Any:  # noqa: ANN401  # the packages have no types
        """Describe what a device may do with memory."""
        described = self._known("CUmemAccessDesc")()
        described.flags = self._known(
            f"CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_{'READWRITE' if allowed else 'NONE'}"
        )
        self.locate(described.location, device)
        return described

    def locate(self, location: Any, device: int) -> None:  # noqa: ANN401  # the packages have no types
        """Fill in a device as a place of memory."""
        location.type = self._known("CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE")
        location.id = device

    def _known(self, name: str) -> Any:  # noqa: ANN401  # the packages have no types
        return attrgetter(self.symbol(name))(self._bindings)
