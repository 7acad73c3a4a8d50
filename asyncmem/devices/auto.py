"""Find a device by its name."""

from collections.abc import Callable
from typing import Final

from asyncmem.devices.base import Device
from asyncmem.devices.cuda import Cuda
from asyncmem.devices.host import Host
from asyncmem.devices.simulated import Simulated
from asyncmem.errors import BackendUnavailable, DeviceError, InvalidRequest

_KNOWN: Final = "'auto', 'host', 'simulated', 'simulated:N' or 'cuda:N'"


def device(source: str | Device = "auto", /) -> Device:
    """Return a device that the caller owns and closes; one given as such is passed through and stays its owner's.

    Args:
        source: "auto" is a GPU where one can be used, else "host". "simulated" has a virtual clock and an order
            checker. Each call with a name makes a device object of its own.

    Raises:
        InvalidRequest: There is no such name.
        BackendUnavailable: The device exists, but not here; it says what was tried.
    """
    if isinstance(source, Device):
        return source
    kind, _, number = str(source).partition(":")
    make = _MAKERS.get(kind)
    if make is None or not (number or "0").isdecimal():
        raise InvalidRequest("device", source, f"{_KNOWN} or a Device")
    return make(int(number or "0"))


def _host(index: int) -> Device:
    if index:
        raise InvalidRequest("device", f"host:{index}", "'host': there is one")
    return Host()


def _simulated(index: int) -> Device:
    return Simulated(index=index)


def _cuda(index: int) -> Device:
    return Cuda(index)


def _auto(index: int) -> Device:
    if index:
        raise InvalidRequest("device", f"auto:{index}", "'auto', or 'cuda:N' for one among several")
    try:
        return Cuda()
    except (BackendUnavailable, DeviceError):
        return Host()  # `asyncmem doctor` says what is wrong with the GPU


_MAKERS: Final[dict[str, Callable[[int], Device]]] = {
    "auto": _auto,
    "host": _host,
    "simulated": _simulated,
    "cuda": _cuda,
}
