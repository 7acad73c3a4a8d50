"""cuda.core's buffers from a pool, a budget or a lease; `share.as_memory_resource()` makes them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cuda.core import Buffer, MemoryResource

from asyncmem.interop.routing import allocate, device_of

if TYPE_CHECKING:
    from cuda.core import Stream
    from cuda.core.graph import GraphBuilder

    from asyncmem.core import Buffer as OurBuffer
    from asyncmem.pool.share import Share

__all__ = ["ShareMemoryResource"]


class ShareMemoryResource(MemoryResource):  # type: ignore[misc]  # theirs has no types
    """What `Device.memory_resource` may be, and whatever else takes one.

    Memory is ready in the order of the stream that it is asked for, and goes back in the order of the one that its
    buffer is closed on. Both may be closed once that is done.
    """

    def __init__(self, share: Share, *, tag: str = "cuda.core", timeout: float | None = None) -> None:
        self._share, self._tag, self._timeout = share, tag, timeout
        self._device = device_of(share)
        self._live: dict[int, OurBuffer] = {}

    def allocate(self, size: int, *, stream: Stream | GraphBuilder) -> Buffer:
        """Allocate a buffer for the work of a stream.

        Raises:
            InvalidRequest: The size or the stream is none.
            OutOfMemoryError: There is no such memory, with all facts.
        """
        ours = allocate(self._share, size, _handle(stream), self._tag, self._timeout)
        if not size:  # all that are empty have one address
            return Buffer.from_handle(ours.address, size, owner=ours)
        self._live[ours.address] = ours
        try:
            return Buffer.from_handle(ours.address, size, mr=self, stream=stream)
        except BaseException:
            del self._live[ours.address]
            raise

    def deallocate(self, ptr: Any, size: int, *, stream: Stream | GraphBuilder) -> None:  # noqa: ANN401  # int or theirs
        """Take a buffer's memory back, behind the work of a stream. cuda.core calls it, from any thread."""
        del size
        self._live.pop(int(ptr)).free(_handle(stream))

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


def _handle(stream: Stream | GraphBuilder) -> int:
    """Return a stream's handle. The stream itself would be kept by the pool, and might be closed there."""
    handle: int = stream.__cuda_stream__()[1]
    return handle
