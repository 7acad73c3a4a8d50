"""Take memory of other libraries as arrays, without a copy. The way out is the array's own."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final, NamedTuple, cast

from asyncmem.arrays import Array, ElementType, element_from_dlpack, element_type
from asyncmem.arrays._dlpack import receive
from asyncmem.core import Buffer, Core
from asyncmem.devices import Device, Stream, device
from asyncmem.devices.discovery import gpu_at
from asyncmem.errors import Described, InvalidRequest
from asyncmem.lazy import np
from asyncmem.pool.copies import Copy, Part
from asyncmem.runtime import device as runtime_device

if TYPE_CHECKING:
    from asyncmem.arrays._dlpack import CapsuleType

DlpackDevice = tuple[int, int]
"""DLPack's (device type, number)."""

# DLPack's device types (dlpack.h, DLDeviceType): page-locked and managed memory are kinds of the host's and of CUDA's.
_CPU, _CUDA, _CUDA_HOST, _ROCM, _ROCM_HOST, _CUDA_MANAGED = 1, 2, 3, 10, 11, 13
_KINDS: Final = {
    _CPU: _CPU, _CUDA_HOST: _CPU, _ROCM_HOST: _CPU, _CUDA: _CUDA, _CUDA_MANAGED: _CUDA, _ROCM: _ROCM
}  # fmt: skip
_GPUS: Final = {_CUDA: "cuda", _ROCM: "rocm"}

_DLPACK: Final = (1, 1)  # the newest version that `receive` understands

_EXPECTED: Final = "an object with __dlpack__, __cuda_array_interface__ or the buffer protocol"


def asarray(source: object, *, stream: object = None) -> Array:
    """Return an array over the memory of another library's, without a copy.

    It takes whatever offers DLPack (torch, CuPy, JAX, cuda.core, numpy), `__cuda_array_interface__` (Numba) or the
    buffer protocol. Our own arrays are answered as they are, our buffers as arrays of bytes.

    The array's buffer counts towards no pool. It keeps the memory's owner until it is freed or dropped, and all that
    was made of it is gone. What its owner does with the memory then is not ordered behind our streams: let go of it
    once work on it is complete, or once the owner's stream waits for that.

    Args:
        source: Its elements lie in row-major order, without gaps.
        stream: The stream that will use it, the buffer's home stream. On CUDA it waits for the work that the
            owner has submitted on the memory. None is the device's default stream. Unless it is a stream of ours, its
            device is one that the process shares, opened at the first need (**blocks**, for up to a second on CUDA).

    Raises:
        InvalidRequest: Another layout, elements that arrays do not have, memory of a device that is not ours, or a
            stream of another device than the memory's.
        BufferError: Its owner does not give it away; the owner's words say why.
        BackendUnavailable: It is on a device that cannot be used here.
    """
    if isinstance(source, Buffer):
        source = source.view()
    if isinstance(source, Array):
        if stream is not None:
            source.buffer.use_on(stream)
        return source
    if isinstance(source, np.ndarray):
        return _borrow(_of_numpy(source), *_home_at((_CPU, 0), stream))
    if hasattr(source, "__dlpack__") and hasattr(source, "__dlpack_device__"):
        return _by_dlpack(source, stream)
    interface = getattr(source, "__cuda_array_interface__", None)
    if interface is not None:
        return _by_interface(source, interface, stream)
    return _borrow(_of_numpy(_bytes_of(source)), *_home_at((_CPU, 0), stream))


class _Offer(NamedTuple):
    """Memory of another library, valid as long as `owner` lives."""

    owner: object
    address: int
    element: ElementType
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    """In bytes; None for row-major order."""
    readonly: bool


class _Lender:
    """What borrowed buffers have for a pool: it orders streams, and there is no memory to take back."""

    def _use_on(self, buffer: Buffer, stream: object) -> None:
        if stream is not None:
            _follow(buffer.device.stream_of(stream), buffer.stream)

    def _hand_over(self, buffer: Buffer, stream: object) -> None:
        _cores.pop(buffer.device.dlpack_device, None)  # it would keep the stream for as long as itself
        self._use_on(buffer, stream)
        buffer._set_home(buffer._core.stream_number(stream))

    def _copy(self, buffer: Buffer, nbytes: int, other: object, stream: object, into: bool, offset: int) -> Copy:
        # Copies need a pool for their thread alone, so any will do.
        opened = runtime_device("host").pool._opened
        return opened.copies.start(Part(buffer, nbytes, offset), other, stream, into=into)

    def _pin(self, buffer: Buffer) -> object:
        raise InvalidRequest("pin()", buffer, "a pool's buffer: its owner keeps this one where it is")

    def _to_device(self, buffer: Buffer) -> object:
        raise InvalidRequest("to_device()", buffer, 'a buffer that fallback="host" placed on the host')


_LENDER: Final = _Lender()
_devices: dict[DlpackDevice, Device] = {}
_cores: dict[DlpackDevice, Core] = {}
_making = threading.Lock()


def _borrow(offer: _Offer, owner: Device, home: Stream) -> Array:
    nbytes = math.prod(offer.shape) * offer.element.itemsize
    if nbytes and not _in_rows(offer):
        hint = "make it contiguous first: numpy.ascontiguousarray(...), tensor.contiguous()"
        raise InvalidRequest("strides", offer.strides, f"row-major order of {list(offer.shape)} elements", hint=hint)
    core = _core_of(owner, home)
    buffer = core.borrow(offer.address if nbytes else 0, nbytes, home, offer)
    return buffer.view(offer.element.name, offer.shape)


def _core_of(owner: Device, home: Stream) -> Core:
    """Return a core for what is borrowed, because only cores have buffers.

    To make one takes several times as long as all else. So there is one for all that is at home on the default stream
    of a device that the process shares. One that knows other streams keeps them, and lives no longer than its buffers.
    """
    pair = owner.dlpack_device
    shared = home is owner.default_stream and owner is _devices.get(pair)
    core = _cores.get(pair) if shared else None
    if core is None or core.device is not owner or core.forked:
        core = Core(owner, _LENDER, stream_cache_blocks=0, shared_cache_blocks=0)
        if shared:
            _cores[pair] = core
    return core


def _in_rows(offer: _Offer) -> bool:
    if offer.strides is None:
        return True
    step = offer.element.itemsize
    for length, stride in zip(reversed(offer.shape), reversed(offer.strides), strict=True):
        if length != 1 and stride != step:
            return False
        step *= length
    return True


def _follow(later: Stream, earlier: Stream) -> None:
    if later is not earlier:
        later.wait(earlier.record())


def _home_at(pair: DlpackDevice, stream: object) -> tuple[Device, Stream]:
    """Return the memory's device, that of a stream of ours or else one that the process shares, and the stream."""
    if not isinstance(stream, Stream):
        owner = _device_at(pair)
        return owner, owner.stream_of(stream)
    # Page-locked memory is worked on by a GPU's streams.
    owner = stream.device.pinned() if pair[0] in {_CUDA_HOST, _ROCM_HOST} else stream.device
    own = owner.dlpack_device
    if own == pair or (_KINDS.get(own[0], own[0]), own[1]) == (_KINDS.get(pair[0]), pair[1]):
        return owner, stream
    raise InvalidRequest("stream", stream, f"one of the device that the memory is on, DLPack's {pair}")


def _device_at(pair: DlpackDevice) -> Device:
    kind = _KINDS.get(pair[0])
    if kind is None:
        got = Described(f"memory of DLPack device {pair}")
        raise InvalidRequest("source", got, "memory of the host, CUDA or ROCm", hint="else name a stream of its device")
    key = (kind, pair[1] if kind in _GPUS else 0)
    with _making:
        if key not in _devices:
            _devices[key] = device("host" if kind == _CPU else f"{_GPUS[kind]}:{key[1]}")
        return _devices[key]


# -- how others offer theirs -------------------------------------------------------------------------------------------


def _by_dlpack(source: object, stream: object) -> Array:
    export = cast("Callable[..., CapsuleType]", source.__dlpack__)  # type: ignore[attr-defined]  # the caller looked
    kind, number = source.__dlpack_device__()  # type: ignore[attr-defined]  # as above
    owner, home = _home_at((int(kind), int(number)), stream)
    order = _order_of(_KINDS.get(kind), home)
    try:
        capsule = export(max_version=_DLPACK, **order)
    except TypeError:
        capsule = export(**order)  # from before DLPack 1.0
    loan = receive(capsule)
    element = element_from_dlpack(loan.dtype)
    strides = None if loan.strides is None else tuple(one * element.itemsize for one in loan.strides)
    return _borrow(_Offer(loan, loan.address, element, loan.shape, strides, loan.readonly), owner, home)


def _order_of(kind: int | None, home: Stream) -> dict[str, int]:
    # On CUDA 0 could mean either default stream, so the protocol calls the legacy one 1; on ROCm it forbids 1 and 2.
    if kind == _CUDA:
        return {"stream": home.handle or 1}
    return {"stream": home.handle} if kind == _ROCM else {}


def _by_interface(source: object, interface: Mapping[str, object], stream: object) -> Array:
    if interface.get("mask") is not None:
        raise InvalidRequest("source", type(source), "an array without a mask")
    address, readonly = cast("tuple[int, bool]", interface["data"])
    element = element_type(interface["typestr"])
    shape, strides = cast("tuple[int, ...]", interface["shape"]), interface.get("strides")
    owner, home = _home_at(_dlpack_device_of(address, stream), stream)
    _after(interface.get("stream"), home)
    steps = cast("tuple[int, ...] | None", strides)
    return _borrow(_Offer(source, address, element, tuple(shape), steps, readonly), owner, home)


def _dlpack_device_of(address: int, stream: object) -> DlpackDevice:
    # The interface does not say which GPU it is on; a stream of ours does, and else the driver knows.
    if isinstance(stream, Stream):
        own = stream.device.dlpack_device
        return own if own[0] in _GPUS else (_CUDA, own[1])
    return gpu_at(address) if address else (_CUDA, 0)


def _after(producer: object, home: Stream) -> None:
    if producer is None:
        return
    if producer == 0:
        raise InvalidRequest("stream", producer, "None, 1, 2 or a handle in __cuda_array_interface__")
    _follow(home, home.device.stream_of(producer))


def _bytes_of(source: object) -> np.ndarray[tuple[int, ...], np.dtype[np.generic]]:
    try:
        return np.asarray(memoryview(source))  # type: ignore[arg-type]  # what is asked
    except TypeError:
        raise InvalidRequest("source", type(source), _EXPECTED) from None


def _of_numpy(array: np.ndarray[tuple[int, ...], np.dtype[np.generic]]) -> _Offer:
    # Not by DLPack, which numpy offers for fewer kinds of elements, and before version 2 only for what may be written.
    address, writable = array.ctypes.data, array.flags.writeable
    return _Offer(array, address, element_type(array.dtype), array.shape, array.strides, not writable)
