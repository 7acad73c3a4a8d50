"""What devices there are, how much room they have, and which of them is the one for a program."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Final

from asyncmem.devices.base import Device
from asyncmem.devices.cuda import Cuda
from asyncmem.devices.host import Host
from asyncmem.devices.metal import Metal
from asyncmem.devices.metal.driver import find_devices as find_metal
from asyncmem.devices.opencl import OpenCL
from asyncmem.devices.opencl.driver import find_devices, is_processor
from asyncmem.devices.rocm import Rocm
from asyncmem.errors import BackendUnavailable, DeviceError, InvalidRequest, NoDeviceHasRoom
from asyncmem.facts import Shortfall
from asyncmem.needs import Need, bytes_needed
from asyncmem.options import PoolOptions

_KINDS: Final = ("cuda", "rocm", "metal", "opencl", "host")
"""The kinds of devices with memory of their own; a processor by OpenCL comes last nevertheless."""

_VENDORS: Final[dict[str, int]] = {"cuda": 0x10DE, "rocm": 0x1002}
"""The numbers by which OpenCL tells of those who made the GPUs of another kind: NVIDIA, and AMD."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceInfo:
    """One device of this machine, as it was when it was asked. Sizes are bytes."""

    name: str
    """What `device` and a pool take: "cuda:0"; the kind alone where there is no such device at all."""
    total: int | None = None
    """What it has, or None where that is not known."""
    free: int | None = None
    """What nobody uses, or None where that is not known."""
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
        """Answer the bytes that a pool with these options may have of it now; 0 where it cannot be used."""
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
    cards = (*_cards(Cuda), *(_cards(Rocm) if find_spec("hip") is not None else ()))
    others = tuple(_opencl_devices({_VENDORS[card.kind] for card in cards if card.usable}))
    return (
        *cards,
        *_metal_devices(),
        *(one for one in others if not one.is_processor),
        host,
        *(one for one in others if one.is_processor),
    )


def select_device_for(need: Need, /, *, prefer: str | Sequence[str] = (), options: PoolOptions | None = None) -> str:
    """Answer the name of a device with room for so much (**blocks**, as `devices` does).

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
    listed = devices()
    rooms = {one.name: one.room(options) for one in listed}
    fitting = [one for one in listed if one.usable and rooms[one.name] >= nbytes]
    if not fitting:
        raise NoDeviceHasRoom(nbytes, [_shortfall(one, rooms[one.name], nbytes) for one in listed])
    return min(fitting, key=lambda one: (_rank(one, wishes), *_place(one), -rooms[one.name])).name


def _place(one: DeviceInfo) -> tuple[bool, bool, int]:
    """Order GPUs before the host, and that before what uses its processor in a roundabout way."""
    return one.is_processor, one.is_processor and one.kind != "host", _KINDS.index(one.kind)


def _metal_devices() -> Iterator[DeviceInfo]:
    if find_spec("Metal") is not None:
        for index in range(len(find_metal("metal"))):
            yield _open(f"metal:{index}", partial(Metal, index))


def _opencl_devices(known: set[int]) -> Iterator[DeviceInfo]:
    if find_spec("pyopencl") is None:
        return
    try:
        found = find_devices("opencl")
    except (BackendUnavailable, DeviceError) as error:
        yield DeviceInfo(name="opencl", reason=_words(error))
        return
    for index, one in enumerate(found):
        if one.vendor_id not in known:
            yield _open(f"opencl:{index}", partial(OpenCL, index), is_processor=is_processor(one))


def _cards(make: type[Cuda] | type[Rocm]) -> Iterator[DeviceInfo]:
    try:
        count = make.interface.count_devices()
    except (BackendUnavailable, DeviceError) as error:
        yield DeviceInfo(name=make.kind, reason=_words(error))
        return
    if not count:
        yield DeviceInfo(name=make.kind, reason="the driver shows no GPU")
    for index in range(count):
        yield _open(f"{make.kind}:{index}", partial(make, index))


def _open(name: str, make: Callable[[], Device], *, is_processor: bool = False) -> DeviceInfo:
    try:
        device = make()
        try:
            memory = device.memory()
        finally:
            device.close()
    except (BackendUnavailable, DeviceError) as error:
        return DeviceInfo(name=name, reason=_words(error), is_processor=is_processor)
    return DeviceInfo(name=name, total=device.capacity, free=memory.free, is_processor=is_processor)


def _words(error: BackendUnavailable | DeviceError) -> str:
    return ", ".join(error.tried) if isinstance(error, BackendUnavailable) else str(error)


def _shortfall(one: DeviceInfo, room: int, need: int) -> Shortfall:
    return Shortfall(device=one.name, room=room, lacking=max(need - room, 0), reason=one.reason)


def _rank(one: DeviceInfo, wishes: Sequence[str]) -> int:
    return next((place for place, wish in enumerate(wishes) if wish in (one.name, one.kind)), len(wishes))


def _check(wish: str) -> None:
    kind, _, number = str(wish).partition(":")
    if kind not in _KINDS or (number and (kind == "host" or not number.isdecimal())):
        kinds = ", ".join(map(repr, _KINDS))
        raise InvalidRequest("prefer", wish, f"kinds of devices, {kinds}, or names such as 'cuda:0'")
