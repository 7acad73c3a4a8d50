"""A vendor's driver interface before a device is there: loading it, starting it, and errors that say what to do.

CUDA's and HIP's are one interface under two sets of names, with the same numbers for errors. So calls are named here as
CUDA names them, and each interface says what is different about it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Final

from asyncmem.errors import BackendUnavailable, DeviceError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from asyncmem.devices.gpu._calls import Library

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

INSTEAD: Final = "Use 'host' for real memory on this machine, or 'simulated' to test GPU code without a GPU"
"""What helps where no GPU does."""

_FORKED: Final = "process was forked from one that uses the GPU; start workers with the method 'spawn'"
COMMON_ADVICE: Final = {
    NOT_INITIALIZED: f"This {_FORKED}",
    DEINITIALIZED: f"Its device is closed, the interpreter is ending, or this {_FORKED}",
    INVALID_CONTEXT: "Somebody has reset the device or destroyed its context",
    CONTEXT_IS_DESTROYED: "Somebody has reset the device or destroyed its context",
    **dict.fromkeys(
        range(900, 910), "A graph is being captured: use a capturing stream's memory within pool.graph() only"
    ),
}
"""What to do about a code, whoever's it is."""


class Interface(ABC):
    """What there is once for all devices of a vendor. What is asked of `library` is asked after `start`."""

    kind: str
    """What its devices are called: "cuda"."""
    name: str
    """What it is called itself."""
    useless: Mapping[int, str]
    """Codes of the first call that mean a machine on which nothing can be had, and not one where something broke."""
    advice: Mapping[int, str]
    """What to do about a code."""
    names: Mapping[int, str]
    """Names of the codes that are made here, where the driver cannot be asked."""
    library: Library
    """The driver's functions."""

    @abstractmethod
    def load(self, library: Library, device: str) -> None:
        """Load the driver, for a device of that name.

        Raises:
            BackendUnavailable: It is not there, or too old.
        """

    @abstractmethod
    def hidden(self) -> tuple[str, ...]:
        """Answer what keeps devices from this process's sight."""

    def symbol(self, call: str) -> str:
        """Answer the name that the interface has for a call."""
        return call

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
        self.load(library, device)
        self.library = library
        code = library.start()
        if code in self.useless:
            tried = (f"{self.symbol('cuInit')}: {self.useless[code]}", *self.hidden())
            raise BackendUnavailable(device, tried=tried, install=INSTEAD)
        if code:
            raise self.error_of("cuInit", code, device)

    def count_devices(self) -> int:
        """Start the driver, and answer how many devices it shows (blocks).

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
            tried = (f"the driver: it shows {there}", *self.hidden())
            raise BackendUnavailable(device, tried=tried, install=INSTEAD)

    def error_of(self, call: str, code: int, device: str) -> DeviceError:
        """Make the error for a driver's code."""
        name = self.library.error_name(code) or self.names.get(code, "unknown")
        # It is told here, so nobody else on this thread is to take it for an error of theirs.
        self.library.forget_error()
        return DeviceError(
            self.symbol(call), code=code, code_name=name, device=device, advice=self.advice.get(code, "")
        )

    def _count(self, device: str) -> int:
        count = self.library.device_count()
        if count < 0:
            raise self.error_of("cuDeviceGetCount", -count, device)
        return count
