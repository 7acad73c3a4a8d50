"""Find devices: by name, by the room that a program needs, and by an address.

A name may also be an entry point of another distribution's. One is loaded only when its name is asked for.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Final

from asyncmem.devices.base import Device
from asyncmem.devices.cuda import Cuda
from asyncmem.devices.host import Host
from asyncmem.devices.metal import Metal
from asyncmem.devices.metal.driver import find_devices as find_metal
from asyncmem.devices.opencl import OpenCL
from asyncmem.devices.opencl.driver import find_devices, is_processor
from asyncmem.devices.rocm import Rocm
from asyncmem.devices.simulated.device import Simulated
from asyncmem.errors import AsyncmemError, BackendUnavailable, DeviceError, InvalidRequest, NoDeviceHasRoom
from asyncmem.facts import Shortfall
from asyncmem.options import PoolOptions
from asyncmem.units import Need, bytes_needed

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

GROUP: Final = "asyncmem.devices"
"""The entry points' group: a name such as "toy" stands for something that is called with N for "toy:N"."""


def plugin_device(kind: str, index: int) -> Device | None:
    """Make the device of another distribution, or return None where no such name is offered (blocks).

    Raises:
        BackendUnavailable: Several distributions offer the name, or the one that does is broken.
    """
    offers = [one for one in _offers() if one.name == kind]
    if not offers:
        return None
    name = f"{kind}:{index}"
    if len(offers) > 1:
        raise BackendUnavailable(name, tried=[_origin(one) for one in offers], install="Uninstall all but one of these")
    try:
        made = offers[0].load()(index)
    except AsyncmemError:
        raise  # it says itself what is wrong
    except Exception as error:
        raise _broken(name, offers[0], f"{type(error).__name__}: {error}") from error
    if not isinstance(made, Device):
        raise _broken(name, offers[0], f"it makes a {type(made).__name__}, which is no asyncmem.devices.Device")
    return made


def _offers() -> Sequence[EntryPoint]:
    from importlib.metadata import entry_points

    return tuple(entry_points(group=GROUP))


def _broken(name: str, offer: EntryPoint, why: str) -> BackendUnavailable:
    return BackendUnavailable(
        name, tried=(f"{_origin(offer)}: {why}",), install="Update or uninstall that distribution"
    )


def _origin(offer: EntryPoint) -> str:
    origin = offer.dist.name if offer.dist is not None else "an unknown distribution"
    return f"{offer.value!r} of {origin}"


def device(source: str | Device = "auto", /) -> Device:
    """Return a device that the caller owns and closes; one given as such is passed through and stays its owner's.

    Args:
        source: "auto" is a GPU where one can be used, by CUDA, ROCm, Metal or OpenCL in this order, else "host"; an
            NVIDIA GPU that lacks only the package cuda-python is an error. "gpu" is such a GPU, and an error where
            there is none. "cpu" is "host".
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
        if kind in _SINGLE:
            if index:
                raise InvalidRequest("device", source, f"{kind!r} without a number, or 'cuda:N'")
            return _SINGLE[kind]()
        made = _NUMBERED[kind](index) if kind in _NUMBERED else plugin_device(kind, index)
        if made is not None:
            return made
    offered = sorted({one.name for one in _offers()})
    known = ("auto", "gpu", "host", "simulated", *(f"{kind}:N" for kind in _NUMBERED), *offered)
    raise InvalidRequest("device", source, f"one of {', '.join(map(repr, known))}, or a Device")


def _auto() -> Device:
    try:
        return _gpu()
    except BackendUnavailable as error:
        if error.package:
            raise
    return Host()  # `asyncmem doctor` says what is wrong with the GPU


def _gpu() -> Device:
    tried: list[str] = []
    for make in (Cuda, Rocm, Metal, _opencl_gpu):
        try:
            return make()
        except BackendUnavailable as error:
            if error.package:
                raise
            tried += error.tried
        except DeviceError as error:
            tried.append(str(error))
    raise BackendUnavailable("gpu", tried=tried)


def _opencl_gpu() -> Device:
    """Make the first device of OpenCL that is no processor: on that the host itself does better."""
    if all(map(is_processor, find_devices("opencl"))):
        raise BackendUnavailable("opencl", tried=("the OpenCL drivers: they have no GPU",))
    return OpenCL()


_SINGLE: Final[dict[str, Callable[[], Device]]] = {"auto": _auto, "gpu": _gpu, "host": Host, "cpu": Host}
_NUMBERED: Final[dict[str, Callable[[int], Device]]] = {
    "simulated": lambda index: Simulated(index=index),
    "cuda": Cuda,
    "rocm": Rocm,
    "metal": Metal,
    "opencl": OpenCL,
}

_KINDS: Final = ("cuda", "rocm", "metal", "opencl", "host")
"""The kinds of devices with memory of their own; a processor by OpenCL comes last nevertheless."""

_VENDORS: Final[dict[str, int]] = {"cuda": 0x10DE, "rocm": 0x1002}
"""The vendor numbers in OpenCL of GPUs that are devices of another kind: NVIDIA, and AMD."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceInfo:
    """One device of this machine, as it was when it was asked. Sizes are bytes."""

    name: str
    """What `device` and a pool take: "cuda:0"; the kind alone where there is no such device at all."""
    total: int | None = None
    """What it has, or None where that is not known."""
    free: int | None = None
    """Free bytes, or None if unknown."""
    reason: str | None = None
    """Why it cannot be used, or None where it can."""
    is_processor: bool = False
    """Whether it is this machine's own processor, with the host's memory."""

    @property
    def usable(self) -> bool:
        """Whether a pool can be opened on it here."""
        return self.reason is None

    @property
    def kind(self) -> str:
        """The part of the name before its number."""
        return self.name.partition(":")[0]

    def room(self, options: PoolOptions | None = None) -> int:
        """Return the bytes that a pool with these options may have of it now; 0 where it cannot be used."""
        if self.reason is not None or self.free is None or self.total is None:
            return 0
        return (options or PoolOptions()).room(self.kind, free=self.free, total=self.total)


def devices() -> tuple[DeviceInfo, ...]:
    """List the GPUs, the host, and last what else OpenCL has (**blocks**: each is opened, asked and closed).

    What cannot be used is listed with the reason, but ROCm, Metal and OpenCL only where their packages are installed. A
    GPU that CUDA or ROCm can use is not listed a second time. The simulated device has no memory of its own, and those
    of other distributions are loaded only by their names: neither is listed.
    """
    memory = Host().memory()
    host = DeviceInfo(name="host", total=memory.total, free=memory.free, is_processor=True)
    found = _listed("cuda", lambda: _cards(Cuda))
    if find_spec("hip") is not None:
        found += _listed("rocm", lambda: _cards(Rocm))
    known = {_VENDORS[card.kind] for card in found if card.usable}
    if find_spec("Metal") is not None:
        found += _listed("metal", lambda: dict.fromkeys(range(len(find_metal("metal"))), False))
    if find_spec("pyopencl") is not None:
        found += _listed("opencl", lambda: _opencl_devices(known))
    return tuple(sorted([*found, host], key=lambda one: (one.is_processor, one is not host)))


def select_device_for(need: Need, /, *, prefer: str | Sequence[str] = (), options: PoolOptions | None = None) -> str:
    """Return the name of a device with room for so much (**blocks**, as `devices` does).

    Room is what a pool may have: less than `fraction` of the device, and what is free but for `min_free`. A GPU comes
    before the host, by CUDA, ROCm, Metal or OpenCL in this order, and among those of a kind the one with most
    room.

    Args:
        need: A size, or an estimate, whose total is meant.
        prefer: Names or kinds that come before all others, the first the soonest: "host", ("cuda:1", "cuda").
        options: Those of the pool that is to be opened there.

    Raises:
        NoDeviceHasRoom: None has it; it lists what each lacks, and why one cannot be used.
        InvalidRequest: The need is no size, or what is preferred no device.
    """
    nbytes = bytes_needed(need)
    wishes = (prefer,) if isinstance(prefer, str) else tuple(prefer)
    for wish in wishes:
        _check(wish)
    rooms = {one: one.room(options) for one in devices()}
    fitting = [one for one, room in rooms.items() if one.usable and room >= nbytes]
    if not fitting:
        shortfalls = [
            Shortfall(device=one.name, room=room, lacking=max(nbytes - room, 0), reason=one.reason)
            for one, room in rooms.items()
        ]
        raise NoDeviceHasRoom(nbytes, shortfalls)

    def order(one: DeviceInfo) -> tuple[object, ...]:
        """Order GPUs before the host, and that before what uses its processor in a roundabout way."""
        rank = next((place for place, wish in enumerate(wishes) if wish in (one.name, one.kind)), len(wishes))
        roundabout = one.is_processor and one.kind != "host"
        return rank, one.is_processor, roundabout, _KINDS.index(one.kind), -rooms[one]

    return min(fitting, key=order).name


def _cards(make: type[Cuda | Rocm]) -> dict[int, bool]:
    count = make.interface.count_devices()
    if not count:
        raise BackendUnavailable(make.kind, tried=("the driver shows no GPU",))
    return dict.fromkeys(range(count), False)


def _opencl_devices(known: set[int]) -> dict[int, bool]:
    found = find_devices("opencl")
    return {index: is_processor(one) for index, one in enumerate(found) if one.vendor_id not in known}


def _listed(kind: str, find: Callable[[], dict[int, bool]]) -> list[DeviceInfo]:
    """List the devices of a kind; `find` returns their numbers, and whether each is a processor."""
    try:
        numbers = find()
    except (BackendUnavailable, DeviceError) as error:
        return [DeviceInfo(name=kind, reason=_words(error))]
    return [_open(kind, index, is_processor=processor) for index, processor in numbers.items()]


def _open(kind: str, index: int, *, is_processor: bool) -> DeviceInfo:
    name = f"{kind}:{index}"
    try:
        with contextlib.closing(_NUMBERED[kind](index)) as device:
            return DeviceInfo(name=name, total=device.capacity, free=device.memory().free, is_processor=is_processor)
    except (BackendUnavailable, DeviceError) as error:
        return DeviceInfo(name=name, reason=_words(error), is_processor=is_processor)


def _words(error: BackendUnavailable | DeviceError) -> str:
    return ", ".join(error.tried) if isinstance(error, BackendUnavailable) else str(error)


def _check(wish: str) -> None:
    kind, _, number = str(wish).partition(":")
    if kind not in _KINDS or (number and (kind == "host" or not number.isdecimal())):
        kinds = ", ".join(map(repr, _KINDS))
        raise InvalidRequest("prefer", wish, f"kinds of devices, {kinds}, or names such as 'cuda:0'")


def gpu_at(address: int) -> tuple[int, int]:
    """Return DLPack's type and number of the GPU that has the memory at `address` (blocks at the first need).

    Raises:
        BackendUnavailable: No GPU can be used here.
        DeviceError: The drivers know of no such memory.
    """
    refusals: list[BackendUnavailable | DeviceError] = []
    for kind in (Cuda, Rocm):
        try:
            return kind.dlpack_type, kind.index_of(address)
        except (BackendUnavailable, DeviceError) as refusal:
            refusals.append(refusal)
    raise refusals[0]
