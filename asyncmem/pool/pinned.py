"""A pool's page-locked host memory: a pool of its own, whose buffers copies of the device read and write directly."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from asyncmem.errors import PoolClosed

if TYPE_CHECKING:
    from asyncmem.pool.pool import AsyncMemoryPool

_SHARE = 0.25  # of the host's memory: what is page-locked is lost to everybody else


class PinnedMemory:
    """The host pool that belongs to a pool, made at the first need and closed with it."""

    def __init__(self, pool: AsyncMemoryPool) -> None:
        self._name = pool.name
        self._making = threading.Lock()
        self._pool: AsyncMemoryPool | None = None
        self._closed = False

    def of(self, pool: AsyncMemoryPool) -> AsyncMemoryPool:
        """Answer the host pool of `pool`, whose part this is.

        Raises:
            PoolClosed: It has been closed.
            InvalidRequest: The device has no such memory.
        """
        from asyncmem.pool.pool import AsyncMemoryPool

        with self._making:
            if self._closed:
                raise PoolClosed(f"{self._name} pinned")
            if self._pool is None:
                self._pool = AsyncMemoryPool(pool.device.pinned(), name=f"{self._name} pinned", limit=_SHARE)
            return self._pool

    async def aclose(self, timeout: float) -> None:
        """Close it; its buffers stay valid until they are freed."""
        found = self._end()
        if found is not None:
            await found.aclose(timeout)

    def close(self, timeout: float) -> None:
        """Close it from synchronous code (blocks for at most `timeout` seconds)."""
        found = self._end()
        if found is not None:
            found.close(timeout)

    def _end(self) -> AsyncMemoryPool | None:
        with self._making:
            self._closed = True
            return self._pool
