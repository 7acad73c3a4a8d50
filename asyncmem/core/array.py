"""A typed view over a buffer, exchanged with other libraries by their protocols and without a copy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, cast, final

import numpy as np

from asyncmem.core._dlpack import legacy_capsule, versioned_capsule
from asyncmem.core.elements import element_type
from asyncmem.errors import BufferReleased, InvalidRequest

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from asyncmem.core._core import Buffer
    from asyncmem.core._dlpack import CapsuleType

_DLPACK_CPU: Final = (1, 0)


@final
class Array:
    """A buffer's bytes as elements in row-major order.

    Keeps its buffer alive but does not keep it from being freed: after `buffer.free()` every use raises BufferReleased.
    What other libraries made of it before stays valid, because exports hold the memory.

    Attributes:
        buffer: The buffer whose bytes these are.
        shape: The length of each dimension.
    """

    __slots__ = ("__weakref__", "_element", "_pin", "buffer", "shape")

    def __init__(self, buffer: Buffer, dtype: object = "uint8", shape: int | Sequence[int] | None = None) -> None:
        """View `buffer` from its first byte; one length of `shape` may be -1, None is one dimension over all bytes."""
        self.buffer = buffer
        self._element = element_type(dtype)
        self._pin: object = None
        self.shape = _resolve(-1 if shape is None else shape, self._element.itemsize, buffer.nbytes)

    @property
    def dtype(self) -> np.dtype[np.generic] | str:
        """The numpy dtype, or the name of a short float that numpy has none for."""
        return self._element.name if self._element.numpy is None else self._element.numpy

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
        """Answer the length of the first dimension."""
        if not self.shape:
            raise TypeError("an array without dimensions has no length")
        return self.shape[0]

    def __repr__(self) -> str:
        """Answer one line: element type, shape, buffer."""
        return f"<Array {self._element.name}{list(self.shape)} over {self.buffer!r}>"

    def numpy(self) -> NDArray[np.generic]:
        """Answer a numpy array over the same memory, which counts as an export of the buffer.

        Work of streams on the memory is not waited for: synchronize first.

        Raises:
            BufferError: The host cannot read this memory, or numpy has no such element type.
        """
        self._need("numpy()")
        if self._element.numpy is None:
            plain = f"uint{self._element.itemsize * 8}"
            raise BufferError(f"numpy has no {self._element.name}: view the buffer as {plain!r}")
        flat = np.frombuffer(memoryview(self.buffer)[: self.nbytes], dtype=self._element.numpy)
        return flat.reshape(self.shape)

    @property
    def __array_interface__(self) -> dict[str, object]:
        """Memory the host can read, by numpy's protocol; from the first read on, this array counts as an export."""
        self._need("__array_interface__")
        if not self.buffer.device.host_readable:
            raise AttributeError(f"{self.buffer.location} memory cannot be read by the host: copy it there first")
        return {"version": 3, **self._interface()}

    @property
    def __cuda_array_interface__(self) -> dict[str, object]:
        """CUDA memory by Numba's protocol, version 3; consumers name no stream, so the block waits for all of them."""
        if self.buffer.device.kind != "cuda":
            raise AttributeError(f"{self.buffer.location} memory is not CUDA memory")
        self._need("__cuda_array_interface__")
        self.buffer.use_on(None)
        # The protocol has no 0: 1 names the legacy default stream.
        return {"version": 3, **self._interface(), "stream": self.buffer.stream.handle or 1}

    def _interface(self) -> dict[str, object]:
        if self._element.numpy is None:
            raise AttributeError(f"array interfaces have no {self._element.name}: use DLPack")
        if self._pin is None:
            self._pin = self.buffer._pin()
        address = self.buffer.address if self.nbytes else 0
        return {"shape": self.shape, "typestr": self._element.numpy.str, "data": (address, False), "strides": None}

    def __dlpack_device__(self) -> tuple[int, int]:
        """Answer (device type, number) by the DLPack protocol."""
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
            stream: On CUDA the consumer's stream as the protocol numbers them: it waits for the home stream, and the
                block waits for it. -1: the consumer orders itself, and the block waits for the whole context.
            max_version: From (1, 0) on the capsule is a versioned one.
            dl_device: Must be this memory's own device.
            copy: True makes a copy, which only memory that the host can read allows.

        Raises:
            BufferError: The memory cannot be exported that way.
            InvalidRequest: A stream for memory that has none.
        """
        self._need("__dlpack__()")
        device = self.__dlpack_device__()
        if dl_device is not None and tuple(dl_device) != device:
            raise BufferError(f"memory of DLPack device {device} cannot be exported to device {tuple(dl_device)}")
        if copy:
            return self._copied(max_version)
        self._order(stream)
        make = versioned_capsule if max_version is not None and max_version[0] >= 1 else legacy_capsule
        address = self.buffer.address if self.nbytes else 0
        return make(self.buffer._pin(), address, self.shape, self._element.dlpack, device)

    def _copied(self, max_version: tuple[int, int] | None) -> CapsuleType:
        if self.__dlpack_device__() != _DLPACK_CPU:
            raise BufferError("copy=True is only for memory that the host can read: copy on a stream instead")
        numbers = cast("NDArray[np.number]", self.numpy().copy())
        return numbers.__dlpack__(max_version=max_version)

    def _order(self, stream: int | None) -> None:
        if self.buffer.device.kind != "cuda":
            if stream is not None:
                raise InvalidRequest("stream", stream, "None: only CUDA memory is exported to a stream")
            return
        # None means the legacy default stream, which the protocol numbers 1.
        self.buffer.use_on(None if stream == -1 else 1 if stream is None else stream)

    def _need(self, action: str) -> None:
        if not self.buffer.alive:
            raise BufferReleased(self.buffer.nbytes, tag=self.buffer.tag, action=action)


def _resolve(shape: int | Sequence[int], itemsize: int, nbytes: int) -> tuple[int, ...]:
    asked: list[object] = [shape] if isinstance(shape, int) else list(shape)
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
