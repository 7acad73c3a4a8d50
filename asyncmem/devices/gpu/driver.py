"""A vendor's driver: once for all devices (`Interface`), and as one device calls it by name (`Driver`).

CUDA's and HIP's are one interface under two sets of names, with the same numbers for errors. So calls are named here as
CUDA names them, and each vendor says what is different about it. The vendors' Python packages have no types worth the
name and take long to import, so they are met by the subclasses of `Driver` and nowhere else, and only once a device is
asked for. The hot calls go another way, through the function pointers of `_calls`.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from asyncmem.devices.base import INSTEAD
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


@dataclass(kw_only=True, eq=False)
class Interface:
    """A vendor's driver, once for all its devices. What is asked of `library` is asked after `start`."""

    kind: str
    """What its devices are called: "cuda"."""
    name: str
    """What it is called itself."""
    load: Callable[[Library, str], str]
    """Load the driver, for a device of that name; return why that is not possible, or an empty string."""
    install: str
    """What to install where it is not there, or too old."""
    oldest: int
    """The oldest version that can be used."""
    version_text: Callable[[int], str]
    """Name what is installed, by its version."""
    selectors: Sequence[str]
    """Environment variables that choose devices, and hide all others."""
    useless: Mapping[int, str]
    """Codes of the first call that mean a machine on which nothing can be had, and not one where something broke."""
    advice: Mapping[int, str]
    """What to do about a code."""
    names: Mapping[int, str]
    """Names of the codes that are made here, where the driver cannot be asked."""
    symbol: Callable[[str], str] = str
    """Return the driver's own name for a call."""
    library: Library = field(init=False)
    """The driver's functions."""

    def start(self, device: str) -> None:
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
        missing = self.load(library, device)
        if not missing and 0 < library.version() < self.oldest:
            missing = self.version_text(library.version())
        if missing:
            raise BackendUnavailable(device, tried=(missing,), install=self.install)
        self.library = library
        code = library.start()
        if code in self.useless:
            tried = (f"{self.symbol('cuInit')}: {self.useless[code]}", *self._hidden())
            raise BackendUnavailable(device, tried=tried, install=INSTEAD)
        if code:
            raise self.error_of("cuInit", code, device)

    def count_devices(self) -> int:
        """Start the driver, and return how many devices it shows (blocks).

        Raises:
            BackendUnavailable: There is no driver, or one that is too old, or no GPU for it.
            DeviceError: The driver fails.
        """
        self.start(self.kind)
        return self._count(self.kind)

    def check_index(self, device: str, index: int) -> None:
        """See that the started driver has a device of that number.

        Raises:
            BackendUnavailable: It has fewer.
            DeviceError: The driver fails.
        """
        count = self._count(device)
        if index >= count:
            last = f"{self.kind}:0 to {self.kind}:{count - 1}" if count > 1 else f"{self.kind}:0"
            there = "no GPU" if count == 0 else f"only {last}"
            tried = (f"the driver: it shows {there}", *self._hidden())
            raise BackendUnavailable(device, tried=tried, install=INSTEAD)

    def error_of(self, call: str, code: int, device: str) -> DeviceError:
        """Make the error for a driver's code."""
        name = self.library.error_name(code) or self.names.get(code, "unknown")
        # It is told here, so no other library on this thread is to take it for an error of its own.
        self.library.forget_error()
        return DeviceError(
            self.symbol(call), code=code, code_name=name, device=device, advice=self.advice.get(code, "")
        )

    def _hidden(self) -> tuple[str, ...]:
        found = ((one, os.environ.get(one)) for one in self.selectors)
        return tuple(f"{one} is {value!r}, which hides all others" for one, value in found if value is not None)

    def _count(self, device: str) -> int:
        count = self.library.device_count()
        if count < 0:
            raise self.error_of("cuDeviceGetCount", -count, device)
        return count


class Driver(ABC):
    """Calls of the driver, by CUDA's names. The caller makes the context current before.

    Attributes:
        interface: The vendor's driver, which is started.
        calls: How many calls there have been.
        gone: Whether no call may be made any more: the interpreter is ending, or this is a forked child. Kept here,
            for what is dropped at the very end can import nothing.
        joins_mappings: Whether one call may unmap, or set the access of, several mappings that lie side by side.
    """

    interface: Interface
    joins_mappings: bool

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

    @abstractmethod
    def import_bindings(self, device: str) -> ModuleType:
        """Import the vendor's package for a device of that name."""

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
        return self.interface.error_of(call, code, self._device)

    def out_of_memory(self, asked: int) -> OutOfMemoryError:
        """Make the error for bytes that the driver has not, with what it has."""
        self.interface.library.forget_error()
        code, *found = self._find("cuMemGetInfo")()
        free = None if code else int(found[0])
        return OutOfMemoryError(OutOfMemoryFacts(asked=asked, device=self._device, device_free=free))

    def _find(self, function: str) -> Callable[..., Any]:
        found: Callable[..., Any] = getattr(self._bindings, self.interface.symbol(function))
        self._functions[function] = found
        return found

    def pointer_attribute(self, name: str, address: int) -> int | None:
        """Ask what memory there is at an address; None where the driver knows nothing of it."""
        try:
            return self.known_attribute(name, address)
        except DeviceError as error:
            if error.code != INVALID_VALUE:
                raise
            return None

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
    def granularity(self, device: int) -> int:
        """Ask for the unit of physical memory, in bytes."""

    @abstractmethod
    def create_pool(self, device: int) -> object:
        """Make a memory pool of the driver's on a device, which keeps what is free until it is trimmed."""

    @abstractmethod
    def open_pool(self, pool: object, devices: Sequence[int], *, allowed: bool = True) -> None:
        """Let devices use all that a memory pool gives out, or no longer."""

    @abstractmethod
    def location(self, device: int) -> object:
        """Describe a device as a place of memory."""

    @abstractmethod
    def home(self, context: Context) -> object:
        """Return how calls between two devices name the one that a context is of."""
