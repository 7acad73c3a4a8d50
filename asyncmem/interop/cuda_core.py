"""cuda.core's buffers from a pool, a budget or a lease; `share.as_memory_resource()` makes them."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Final

from asyncmem.core import AddressedBuffers
from asyncmem.interop.routing import device_of, needs

with needs("cuda-core"):
    from cuda.core import Buffer, MemoryResource

if TYPE_CHECKING:
    from cuda.core import Stream
    from cuda.core.graph import GraphBuilder

    from asyncmem.devices.base import Stream as OurStream
    from asyncmem.pool.ports import Opened
    from asyncmem.pool.share import Share

__all__ = ["ShareMemoryResource"]

_MOST_KEPT: Final = 64
"""A pool that knows as many streams keeps no more of cuda.core's alive: a program might make one for each request."""


class ShareMemoryResource(MemoryResource):  # type: ignore[misc]  # theirs has no types
    """What `Device.memory_resource` may be, and whatever else takes one.

    Memory is ready in the order of the stream that it is asked for, and goes back in the order of the one that its
    buffer is closed on. Both may be closed once that is done.
    """

    def __init__(self, share: Share, *, tag: str = "cuda.core", timeout: float | str | None = None) -> None:
        self._device = device_of(share)
        self._buffers = AddressedBuffers(share, partial(_find, share._opened), tag=tag, timeout=timeout)

    def allocate(self, size: int, *, stream: Stream | GraphBuilder) -> Buffer:
        """Allocate a buffer for the work of a stream.

        Raises:
            InvalidRequest: The size or the stream is none.
            OutOfMemoryError: There is no such memory, with all facts.
        """
        address = self._buffers.allocate(size, stream)
        try:
            return Buffer.from_handle(address, size, mr=self, stream=stream)
        except BaseException:
            self._buffers.free(address, size, stream)
            raise

    def deallocate(self, ptr: Any, size: int, *, stream: Stream | GraphBuilder) -> None:  # noqa: ANN401  # int or theirs
        """Take a buffer's memory back, behind the work of a stream. cuda.core calls it, from any thread."""
        self._buffers.free(int(ptr), size, stream)

    @property
    def is_device_accessible(self) -> bool:
        """True."""
        return True

    @property
    def is_host_accessible(self) -> bool:
        """False."""
        return False

    @property
    def device_id(self) -> int:
        """The number of the device."""
        return self._device


def _find(opened: Opened, known: dict[int, OurStream], stream: Stream | GraphBuilder, handle: int) -> OurStream:
    """Return the pool's stream for it. A few are kept alive, and so known by their handles from then on."""
    found = opened.device.stream_of(handle)
    if not found.lasting and not found.capturing() and len(opened.core.stream_objects) < _MOST_KEPT:
        found = opened.device.stream_of(_Kept(stream))
    if isinstance(getattr(found, "keeps", None), _Kept):
        known[handle] = found
    return found


class _Kept:
    """A stream's owner beside the object that the program has, and may close."""

    def __init__(self, stream: Stream | GraphBuilder) -> None:
        catcher = _Catcher()
        Buffer.from_handle(1, 1, mr=catcher, stream=stream).close()
        self.__cuda_stream__ = catcher.streams.pop().__cuda_stream__


class _Catcher(MemoryResource):  # type: ignore[misc]  # as above
    """A resource whose one buffer is closed at once: its `deallocate` gets the other owner of the stream."""

    is_device_accessible, is_host_accessible, device_id = True, False, 0

    def __init__(self) -> None:
        self.streams: list[Stream] = []

    def deallocate(self, *_: object, stream: Stream) -> None:
        self.streams.append(stream)
