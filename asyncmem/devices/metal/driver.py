"""PyObjC: finding it and the devices of Metal, calling it, and errors in Metal's words."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Final, ParamSpec, TypeVar

from asyncmem.errors import BackendUnavailable, DeviceError

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

    from asyncmem.devices.metal.api import MTLCommandBuffer, MTLDevice

P = ParamSpec("P")
T = TypeVar("T")

_INSTEAD: Final = "Use 'host' for real memory on this machine, or 'simulated' to test GPU code without a GPU"
_PACKAGE: Final = f"On macOS: pip install 'asyncmem[metal]'. {_INSTEAD}"
_NO_CODE: Final = 0
_NIL: Final = "it answers nil"


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
        there = f"metal:0 to metal:{len(found) - 1}" if len(found) > 1 else "metal:0" if found else "no device"
        raise BackendUnavailable(device, tried=(f"Metal: it has {there}",), install=_INSTEAD)
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
        """Return what lets go of temporary objects at its end: threads of Python's have nothing else that does."""
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
        """Make one call that answers an object.

        Raises:
            DeviceError: It fails, or answers none.
        """
        found = self.call(method, *args, **kwargs)
        if found is None:
            raise self.failure(method.__name__, _NO_CODE, _NIL)
        return found

    def make(self, method: Callable[P, T | None], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a method that makes a new object, and own that once.

        Raises:
            DeviceError: It fails, or makes none.
        """
        made = self.make_if_possible(method, *args, **kwargs)
        if made is None:
            raise self.failure(method.__name__, _NO_CODE, _NIL)
        return made

    def make_if_possible(self, method: Callable[P, T | None], /, *args: P.args, **kwargs: P.kwargs) -> T | None:
        """Call a method that makes a new object, and own that once; None where it makes none.

        Such an object comes with a reference that its caller owns. PyObjC up to 12.2.2 takes that for somebody else's
        and adds its own (its issue 690), so that nothing would ever be freed.

        Raises:
            DeviceError: It fails.
        """
        with self.pool():
            made = self.call(method, *args, **kwargs)
            if made is not None and not self._knows_that_it_owns(method):
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

    def _knows_that_it_owns(self, method: Callable[P, object]) -> bool:
        name = method.__name__
        if name not in self._retained:
            answer = method.__metadata__()["retval"]  # type: ignore[attr-defined]  # every method of PyObjC has that
            self._retained[name] = bool(answer.get("already_retained", False))
        return self._retained[name]
