"""A pool's page-locked host memory: pools of their own, whose buffers copies of the device read and write directly."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Final

from asyncmem.errors import PoolClosed

if TYPE_CHECKING:
    from asyncmem.pool.pool import AsyncMemoryPool

SHARE: Final = 0.25
"""Of the host's memory: what is page-locked is lost to everybody else."""


class PinnedMemory:
    """A host pool that belongs to a pool, made at the first need and closed with it.

    Args:
        name: What it is called.
        limit: The most that it may have, in bytes or as a share of the host's memory.
    """

    def __init__(self, name: str, limit: float = SHARE) -> None:
        self._name = name
        self._limit = limit
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
                raise PoolClosed(self._name)
            if self._pool is None:
                # What the environment says of segments is meant for the device's own.
                made = AsyncMemoryPool(pool.device.pinned(), name=self._name, limit=self._limit, segments="auto")
                made._worker_factory = pool._worker_factory
                self._pool = made
            return self._pool

    def resize(self, limit: float) -> None:
        """Change the limit, as `AsyncMemoryPool.resize` does."""
        with self._making:
            self._limit = limit
            if self._pool is not None:
                self._pool.resize(limit=limit)

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
