"""A driver as one device calls it, by name, through the vendor's Python package.

Such packages have no types worth the name and take long to import, so they are met by the subclasses of this and
nowhere else, and only once a device is asked for. The hot calls go another way, through the function pointers of
`_calls`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from asyncmem.devices.gpu.interface import DEINITIALIZED, INVALID_VALUE, NOT_FOUND, OUT_OF_MEMORY
from asyncmem.errors import DeviceError, OutOfMemoryError
from asyncmem.facts import OutOfMemoryFacts

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import ModuleType

    from asyncmem.devices.gpu._calls import Context
    from asyncmem.devices.gpu.interface import Interface


class Driver(ABC):
    """Calls of the driver's, by CUDA's names. Whoever calls makes the context current before.

    Attributes:
        calls: How many calls there have been.
        gone: Whether no call may be made any more: the interpreter is ending, or this is a forked child. Kept here,
            for whoever is dropped at the very end can import nothing.
        joins_mappings: Whether one call may unmap, or set the access of, several mappings that lie side by side.
    """

    joins_mappings: bool

    def __init__(self, interface: Interface, device: str) -> None:
        """Serve the device of that name, once the driver is started.

        Raises:
            BackendUnavailable: The Python package of the driver cannot be imported.
        """
        from asyncmem.devices.gpu import _calls

        self.calls = 0
        self.gone = _calls.gone
        self._interface = interface
        self._device = device
        self._bindings = self.import_bindings(device)
        self._functions: dict[str, Callable[..., Any]] = {}

    @abstractmethod
    def import_bindings(self, device: str) -> ModuleType:
        """Import the vendor's package for a device of that name."""

    def call(self, function: str, *arguments: object, asked: int = 0) -> Any:  # noqa: ANN401  # the package has no types
        """Make one call and return what it answers beside its code: a value, several, or None.

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
        return self._interface.error_of(call, code, self._device)

    def out_of_memory(self, asked: int) -> OutOfMemoryError:
        """Make the error for bytes that the driver has not, with what it has."""
        self._interface.library.forget_error()
        code, *found = self._find("cuMemGetInfo")()
        free = None if code else int(found[0])
        return OutOfMemoryError(OutOfMemoryFacts(asked=asked, device=self._device, device_free=free))

    def _find(self, function: str) -> Callable[..., Any]:
        found: Callable[..., Any] = getattr(self._bindings, self._interface.symbol(function))
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
        """Answer how calls between two devices name the one that a context is of."""
