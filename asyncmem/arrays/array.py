"""A typed view over a buffer, exchanged with other libraries by their protocols and without a copy."""

from __future__ import annotations

import math
from collections.abc import Generator, Iterable, Sequence
from typing import TYPE_CHECKING, Final, Protocol, Self, TypeVar, final, overload

from asyncmem.arrays._dlpack import COPIED, READ_ONLY, legacy_capsule, versioned_capsule
from asyncmem.arrays.elements import element_type
from asyncmem.core import Buffer, set_array_type
from asyncmem.errors import BufferReleased, InvalidRequest
from asyncmem.lazy import np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from asyncmem.arrays._dlpack import CapsuleType

S = TypeVar("S", bound="np.generic")

# DLPack's device types: dlpack.h, DLDeviceType.
_CPU: Final = (1, 0)
_CUDA: Final = 2
_ROCM: Final = 10


class Copying(Protocol):
    """A copy that has started: `asyncmem.pool.Copy`."""

    def done(self) -> bool:
        """Return whether all of it is there."""
        ...

    def block(self, timeout: float | None = None) -> bool:
        """Wait on this thread until all of it is there; False when `timeout` seconds passed first."""
        ...

    def __await__(self) -> Generator[object, object, None]:
        """Wait until all of it is there."""
        ...


@final
class Array:
    """A buffer's bytes, or some of them, as elements in row-major order.

    Keeps its buffer alive but does not keep it from being freed: after `buffer.free()` every use raises BufferReleased.
    What other libraries made of it before stays valid, because exports hold the memory.

    Attributes:
        buffer: The buffer whose bytes these are. That of `asarray` is over memory of another library.
        shape: The length of each dimension.
        offset: The first element's distance from the buffer's first byte, in bytes.
    """

    __slots__ = ("__weakref__", "_element", "_pin", "buffer", "offset", "shape")

    def __init__(
        self, buffer: Buffer, dtype: object = "uint8", shape: int | Sequence[int] | None = None, offset: int = 0
    ) -> None:
        """View `buffer` from `offset` on; one length of `shape` may be -1, None is one dimension over all bytes."""
        self.buffer = buffer
        self._element = element_type(dtype)
        self._pin: object = None
        self.offset = _placed(offset, self._element.itemsize, buffer.nbytes)
        self.shape = _resolve(-1 if shape is None else shape, self._element.itemsize, buffer.nbytes - self.offset)

    @property
    def dtype(self) -> np.dtype[np.generic] | str:
        """The numpy dtype, or the name of a short float that numpy has none for."""
        return self._element.name if self._element.numpy is None else self._element.numpy

    @property
    def address(self) -> int:
        """Device address of the first element; 0 where there is none."""
        return self.buffer.address + self.offset if self.nbytes else 0

    @property
    def nbytes(self) -> int:
        """Bytes that the elements take."""
        return math.prod(self.shape) * self._element.itemsize

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def __len__(self) -> int:
        """Return the length of the first dimension."""
        if not self.shape:
            raise TypeError("an array without dimensions has no length")
        return self.shape[0]

    def __repr__(self) -> str:
        """Return one line: element type, shape, buffer."""
        return f"<Array {self._element.name}{list(self.shape)} over {self.buffer!r}>"

    def free(self, stream: object = None) -> None:
        """Free the buffer, and with it all arrays over it; `stream` is the one that used it last: see `Buffer.free`."""
        self.buffer.free(stream)

    def __enter__(self) -> Self:
        """Hold the buffer until the block ends, which frees it; the current task counts as its owner."""
        self.buffer.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        """Free it."""
        self.free()

    def copy_from(self, source: object, *, stream: object = None) -> Copying:
        """Start copying as many elements from the host, or from another buffer or array; see `Buffer.copy_from`.

        Raises:
            InvalidRequest: It has not the bytes of this array, or elements of another size.
        """
        return self.buffer._copy(self._matching("source", source), source, stream, True, self.offset)

    def copy_to(self, target: object, *, stream: object = None) -> Copying:
        """Start copying all elements to the host, or to another buffer or array; see `Buffer.copy_to`.

        Raises:
            InvalidRequest: It has not the bytes of this array, or elements of another size.
        """
        return self.buffer._copy(self._matching("target", target), target, stream, False, self.offset)

    def _matching(self, what: str, other: object) -> int:
        nbytes, itemsize = getattr(other, "nbytes", None), getattr(other, "itemsize", 1)
        if nbytes not in (None, self.nbytes) or itemsize not in (1, self._element.itemsize):
            raise InvalidRequest(what, other, f"{self.nbytes} bytes, in elements of {self._element.itemsize}")
        return self.nbytes

    @overload
    def numpy(self) -> NDArray[np.generic]: ...

    @overload
    def numpy(self, dtype: type[S]) -> NDArray[S]: ...

    def numpy(self, dtype: type[np.generic] | None = None) -> NDArray[np.generic]:
        """Return a numpy array over the same memory, which counts as an export of the buffer for as long as it lives.

        Work of streams on the memory is not waited for: synchronize first.

        Args:
            dtype: What the elements are, for type checkers; it converts nothing.

        Raises:
            BufferError: The host cannot read this memory, or numpy has no such element type.
            InvalidRequest: The elements are something else than `dtype`.
        """
        self._need("numpy()")
        if self._element.numpy is None:
            plain = f"uint{self._element.itemsize * 8}"
            raise BufferError(f"numpy has no {self._element.name}: view the buffer as {plain!r}")
        if dtype is not None and np.dtype(dtype) != self._element.numpy:
            raise InvalidRequest("dtype", np.dtype(dtype).name, f"the array's own, {self._element.name}")
        return np.frombuffer(self._bytes(), dtype=self._element.numpy).reshape(self.shape)

    @property
    def __array_interface__(self) -> dict[str, object]:
        """Memory that the host can read, by numpy's protocol; each array made of it counts as an export by itself."""
        self._need("__array_interface__")
        if not self.buffer.device.host_readable:
            raise AttributeError(f"{self.buffer.location} memory cannot be read by the host: copy it there first")
        # The protocol allows bytes in place of an address. numpy keeps them, and nothing else, until its array is gone.
        return {"version": 3, **self._interface(), "data": self._bytes()}

    @property
    def __cuda_array_interface__(self) -> dict[str, object]:
        """Memory of a GPU by Numba's protocol, version 3, in the order of the home stream; ROCm's libraries use it too.

        Consumers name neither their stream nor their end, only keep this object. So from the first read on it counts
        as an export itself, until it is gone, and the block then waits for all streams of the device.
        """
        if self.__dlpack_device__()[0] not in {_CUDA, _ROCM}:
            raise AttributeError(f"{self.buffer.location} memory is not CUDA memory")
        self._need("__cuda_array_interface__")
        interface = self._interface()
        self.buffer._lend(None)
        if self._pin is None:
            self._pin = self.buffer._pin()
        data = (self.address, self.buffer.readonly)
        # The protocol has no 0: 1 names the legacy default stream.
        return {"version": 3, **interface, "data": data, "stream": self.buffer.stream.handle or 1}

    def _interface(self) -> dict[str, object]:
        if self._element.numpy is None:
            raise AttributeError(f"array interfaces have no {self._element.name}: use DLPack")
        return {"shape": self.shape, "typestr": self._element.numpy.str, "strides": None}

    def _bytes(self) -> memoryview:
        return memoryview(self.buffer)[self.offset : self.offset + self.nbytes]

    def __dlpack_device__(self) -> tuple[int, int]:
        """Return (device type, number) by the DLPack protocol."""
        return self.buffer.device.dlpack_device

    def __dlpack__(
        self,
        *,
        stream: int | None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> CapsuleType:
        """Export by the DLPack protocol; the capsule, and whatever consumes it, counts as an export of the buffer.

        Args:
            stream: On CUDA the consumer's stream as the protocol numbers them (None or 1: the legacy default stream, 2:
                the per-thread one, else a handle): it waits for the home stream, and the block waits for it. -1: the
                consumer orders itself, and the block waits for all streams of the device. On ROCm the default stream is
                None or 0, and 1 and 2 mean nothing.
            max_version: From (1, 0) on the capsule is a versioned one.
            dl_device: This memory's own device, or (1, 0) where the host can read it.
            copy: True makes a copy, which only memory that the host can read allows.

        Raises:
            BufferError: The memory cannot be exported that way.
            InvalidRequest: A stream for memory that has none, or one that the protocol has not.
        """
        self._need("__dlpack__()")
        device = self._exported_as(dl_device)
        versioned = max_version is not None and _pair("max_version", max_version)[0] >= 1
        if copy:
            return self._copied(versioned=versioned)
        if self.buffer.readonly and not versioned:
            raise BufferError("the memory may only be read, which DLPack cannot say before 1.0: copy it")
        self._order(stream)
        facts = self.address, self.shape, self._element.dlpack, device
        if versioned:
            return versioned_capsule(self.buffer._pin(), *facts, flags=READ_ONLY if self.buffer.readonly else 0)
        return legacy_capsule(self.buffer._pin(), *facts)

    def _exported_as(self, wanted: tuple[int, int] | None) -> tuple[int, int]:
        own = self.__dlpack_device__()
        asked = own if wanted is None else _pair("dl_device", wanted)
        if asked not in (own, _CPU) or (asked != own and not self.buffer.device.host_readable):
            raise BufferError(f"memory of DLPack device {own} cannot be exported to device {asked}: copy it there")
        return asked

    def _copied(self, *, versioned: bool) -> CapsuleType:
        if not self.buffer.device.host_readable:
            raise BufferError("copy=True is only for memory that the host can read: copy on a stream instead")
        copied = np.frombuffer(self._bytes(), dtype=np.uint8).copy()
        facts = copied.ctypes.data if self.nbytes else 0, self.shape, self._element.dlpack, _CPU
        return versioned_capsule(copied, *facts, flags=COPIED) if versioned else legacy_capsule(copied, *facts)

    def _order(self, stream: int | None) -> None:
        kind = self.__dlpack_device__()[0]
        if kind not in {_CUDA, _ROCM}:
            if stream is not None:
                raise InvalidRequest("stream", stream, "None: only CUDA memory is exported to a stream")
            return
        default, unknown = (1, {0}) if kind == _CUDA else (0, {1, 2})
        number: object = default if stream is None else stream
        if not isinstance(number, int) or isinstance(number, bool) or number in unknown or not -1 <= number < 1 << 64:
            known = "None or 1 (the legacy default stream), 2 (the per-thread one)"
            known = known if kind == _CUDA else "None or 0 (the default stream)"
            raise InvalidRequest("stream", stream, f"{known}, -1 (no order) or a stream's handle")
        self.buffer._lend(None if number == -1 else number)

    def _need(self, action: str) -> None:
        if not self.buffer.alive:
            raise BufferReleased(self.buffer.nbytes, tag=self.buffer.tag, action=action)


def _pair(what: str, value: object) -> tuple[int, int]:
    match value:
        case (int(first), int(second)):
            return first, second
    raise InvalidRequest(what, value, "two whole numbers")


def _placed(offset: object, itemsize: int, nbytes: int) -> int:
    if isinstance(offset, int) and 0 <= offset <= nbytes and offset % itemsize == 0:
        return offset
    raise InvalidRequest(
        "offset", offset, f"a multiple of the element's {itemsize} bytes, within the buffer's {nbytes}"
    )


def _resolve(shape: int | Sequence[int], itemsize: int, nbytes: int) -> tuple[int, ...]:
    asked: list[object] = list(shape) if isinstance(shape, Iterable) else [shape]
    lengths = [n for n in asked if isinstance(n, int)]
    if len(lengths) < len(asked) or any(n < -1 for n in lengths) or lengths.count(-1) > 1:
        raise InvalidRequest("shape", shape, "lengths of 0 and above, at most one of them -1")
    if -1 in lengths:
        row = math.prod(n for n in lengths if n != -1) * itemsize
        if not row or nbytes % row:
            raise InvalidRequest("shape", shape, f"elements that fill the buffer's {nbytes} bytes exactly")
        lengths[lengths.index(-1)] = nbytes // row
    if math.prod(lengths) * itemsize > nbytes:
        raise InvalidRequest("shape", shape, f"at most the buffer's {nbytes} bytes, of {itemsize} an element")
    return tuple(lengths)


set_array_type(Array)
