"""cuda.core's buffers from a pool, a budget or a lease; `share.as_memory_resource()` makes them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from asyncmem.interop.routing import Streamed, allocate, device_of, needs

with needs("cuda-core"):
    from cuda.core import Buffer, MemoryResource

if TYPE_CHECKING:
    from cuda.core import Stream
    from cuda.core.graph import GraphBuilder

    from asyncmem.core import Buffer as OurBuffer
    from asyncmem.devices.base import Stream as OurStream
    from asyncmem.pool.share import Share

__all__ = ["ShareMemoryResource"]

_MOST_KEPT: Final = 64
"""A pool that knows as many streams keeps no more of cuda.core's alive: a program might make one for each request."""


class ShareMemoryResource(MemoryResource):  # type: ignore[misc]  # theirs has no types
    """What `Device.memory_resource` may be, and whatever else takes one.

    Memory is ready in the order of the stream that it is asked for, and goes back in the order of the one that its
    buffer is closed on. Both may be closed once that is done.
    """

    def __init__(self, share: Share, *, tag: str = "cuda.core", timeout: float | None = None) -> None:
        self._device = device_of(share)
        self._share, self._tag, self._timeout = share, tag, timeout
        self._opened = share._opened
        self._live: dict[int, OurBuffer] = {}  # by address
        self._kept: dict[int, OurStream] = {}  # by handle, which no other stream can have while it is kept alive

    def allocate(self, size: int, *, stream: Stream | GraphBuilder) -> Buffer:
        """Allocate a buffer for the work of a stream.

        Raises:
            InvalidRequest: The size or the stream is none.
            OutOfMemoryError: There is no such memory, with all facts.
        """
        home = self._kept.get(stream.__cuda_stream__()[1]) or self._find(stream)
        buffer = allocate(self._share, size, home, self._tag, self._timeout)
        address = buffer.address
        if size:
            self._live[address] = buffer
        try:
            return Buffer.from_handle(address, size, mr=self, stream=stream)
        except BaseException:
            self.deallocate(address, size, stream=stream)
            raise

    def deallocate(self, ptr: Any, size: int, *, stream: Stream | GraphBuilder) -> None:  # noqa: ANN401  # int or theirs
        """Take a buffer's memory back, behind the work of a stream. cuda.core calls it, from any thread."""
        if size:
            last = self._kept.get(stream.__cuda_stream__()[1]) or self._find(stream)
            self._live.pop(int(ptr)).free(last)

    def _find(self, stream: Stream | GraphBuilder) -> OurStream:
        """Return the pool's stream for it; keep it, and its like, alive, as far as they are few, to know it sooner."""
        handle = stream.__cuda_stream__()[1]
        found = self._opened.device.stream_of(handle)
        if not found.lasting and not found.capturing() and len(self._opened.core.stream_objects) < _MOST_KEPT:
            found = self._opened.device.stream_of(_Kept(stream))
        if isinstance(getattr(found, "keeps", None), _Kept):
            self._kept[handle] = found
        return found

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


class _Kept:
    """A stream's owner beside the object that the program has, and may close."""

    def __init__(self, stream: Streamed) -> None:
        catcher = _Catcher()
        Buffer.from_handle(1, 1, mr=catcher, stream=stream).close()
        self.__cuda_stream__ = catcher.streams.pop().__cuda_stream__


class _Catcher(MemoryResource):  # type: ignore[misc]  # as above
    """Is given another owner of a stream, as whoever takes a buffer back."""

    is_device_accessible, is_host_accessible, device_id = True, False, 0

    def __init__(self) -> None:
        self.streams: list[Streamed] = []

    def deallocate(self, *_: object, stream: Streamed) -> None:
        self.streams.append(stream)
