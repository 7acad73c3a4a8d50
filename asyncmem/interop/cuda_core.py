"""cuda.core's buffers from a pool, a budget or a lease; `share.as_memory_resource()` makes them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from asyncmem.interop.routing import AddressedBuffers, needs

with needs("cuda-core"):
    from cuda.core import Buffer, MemoryResource

if TYPE_CHECKING:
    from cuda.core import Stream
    from cuda.core.graph import GraphBuilder

    from asyncmem.pool.share import Share

__all__ = ["ShareMemoryResource"]


class ShareMemoryResource(MemoryResource):  # type: ignore[misc]  # theirs has no types
    """What `Device.memory_resource` may be, and whatever else takes one.

    Memory is ready in the order of the stream that it is asked for, and goes back in the order of the one that its
    buffer is closed on. Both may be closed once that is done.
    """

    def __init__(self, share: Share, *, tag: str = "cuda.core", timeout: float | None = None) -> None:
        self._buffers = AddressedBuffers(share, tag, timeout)

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
        return self._buffers.device
