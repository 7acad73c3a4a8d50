"""Find a device by its name."""

import contextlib
from collections.abc import Callable
from typing import Final

from asyncmem.devices.base import Device
from asyncmem.devices.cuda import Cuda
from asyncmem.devices.host import Host
from asyncmem.devices.metal import Metal
from asyncmem.devices.opencl import OpenCL
from asyncmem.devices.opencl.driver import find_devices, is_processor
from asyncmem.devices.plugins import plugin_device, plugin_names
from asyncmem.devices.rocm import Rocm
from asyncmem.devices.simulated import Simulated
from asyncmem.errors import BackendUnavailable, DeviceError, InvalidRequest

_KNOWN: Final = ("auto", "host", "simulated", "simulated:N", "cuda:N", "rocm:N", "metal:N", "opencl:N")


def device(source: str | Device = "auto", /) -> Device:
    """Return a device that the caller owns and closes; one given as such is passed through and stays its owner's.

    Args:
        source: "auto" is a GPU where one can be used, by CUDA, ROCm, Metal or OpenCL in this order, else "host".
            "simulated" has a virtual clock and an order checker. Any other name is looked for in the entry points
            `asyncmem.devices` of what is installed. Each call with a name makes a device object of its own.

    Raises:
        InvalidRequest: There is no such name.
        BackendUnavailable: The device exists, but not here, or is another distribution's and broken; it says what was
            tried.
    """
    if isinstance(source, Device):
        return source
    kind, _, number = str(source).partition(":")
    if kind and (number or "0").isdecimal():
        index = int(number or "0")
        make = _MAKERS.get(kind)
        made = make(index) if make else plugin_device(kind, index)
        if made is not None:
            return made
    names = ", ".join(map(repr, (*_KNOWN, *plugin_names())))
    raise InvalidRequest("device", source, f"one of {names}, or a Device")


def _host(index: int) -> Device:
    if index:
        raise InvalidRequest("device", f"host:{index}", "'host': there is one")
    return Host()


def _simulated(index: int) -> Device:
    return Simulated(index=index)


def _cuda(index: int) -> Device:
    return Cuda(index)


def _rocm(index: int) -> Device:
    return Rocm(index)


def _auto(index: int) -> Device:
    if index:
        raise InvalidRequest("device", f"auto:{index}", "'auto', or 'cuda:N' for one among several")
    for make in (Cuda, Rocm, Metal, _opencl_gpu):
        with contextlib.suppress(BackendUnavailable, DeviceError):  # `asyncmem doctor` says what is wrong with the GPU
            return make()
    return Host()


def _opencl_gpu() -> Device:
    """Make the first device of OpenCL that is no processor: on that the host itself does better."""
    if all(map(is_processor, find_devices("opencl"))):
        raise BackendUnavailable("opencl", tried=("the OpenCL drivers: they have no GPU",))
    return OpenCL()


def _metal(index: int) -> Device:
    return Metal(index)


def _opencl(index: int) -> Device:
    return OpenCL(index)


_MAKERS: Final[dict[str, Callable[[int], Device]]] = {
    "auto": _auto,
    "host": _host,
    "simulated": _simulated,
    "cuda": _cuda,
    "rocm": _rocm,
    "metal": _metal,
    "opencl": _opencl,
}
