"""Pools of the host's memory beside a pool: each made at the first need, and closed with it."""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING, Final

from asyncmem.errors import PoolClosed

if TYPE_CHECKING:
    from asyncmem.pool.pool import AsyncMemoryPool

PINNED_SHARE: Final = 0.25
"""Of the host's memory: what is page-locked is lost to everybody else."""


class HostPool:
    """A pool of ordinary memory, for requests that the device has none for (``fallback="host"``).

    With a limit it is one of page-locked memory, whose buffers copies of the device read and write directly.

    Args:
        name: What it is called.
        limit: The most page-locked memory that it may have, in bytes or as a share of the host's memory.
    """

    def __init__(self, name: str, limit: float | None = None) -> None:
        self.name = name
        self._limit = limit
        self._lock = threading.Lock()
        self._pool: AsyncMemoryPool | None = None
        self._closed = False

    def of(self, pool: AsyncMemoryPool) -> AsyncMemoryPool:
        """Return the host pool of `pool`, whose part this is.

        Raises:
            PoolClosed: It has been closed.
            InvalidRequest: The device has no such memory.
        """
        with self._lock:
            if self._closed:
                raise PoolClosed(self.name)
            if self._pool is None:
                made = self._make(pool)
                made._worker_factory = pool._worker_factory
                self._pool = made
            return self._pool

    def _make(self, pool: AsyncMemoryPool) -> AsyncMemoryPool:
        from asyncmem.pool.pool import AsyncMemoryPool

        # What the environment says of segments is meant for the device's own.
        if self._limit is not None:
            return AsyncMemoryPool(pool.device.pinned(), name=self.name, limit=self._limit, segments="auto")
        made = AsyncMemoryPool("host", name=self.name, segments="auto")
        made._fallback_of = weakref.ref(pool)
        return made

    def resize(self, limit: float) -> None:
        """Change the limit, as `AsyncMemoryPool.resize` does."""
        with self._lock:
            self._limit = limit
            if self._pool is not None:
                self._pool.resize(limit=limit)

    async def aclose(self, timeout: float | None) -> None:
        """Close it; its buffers stay valid until they are freed."""
        found = self._end()
        if found is not None:
            await found.aclose(timeout)

    def close(self, timeout: float | None) -> None:
        """Close it from synchronous code (blocks for at most `timeout` seconds)."""
        found = self._end()
        if found is not None:
            found.close(timeout)

    def _end(self) -> AsyncMemoryPool | None:
        with self._lock:
            self._closed = True
            return self._pool
