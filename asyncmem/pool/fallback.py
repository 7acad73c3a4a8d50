"""Buffers on the host for requests that their device has no memory for (``fallback="host"``)."""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from asyncmem.core import Batch, Buffer
    from asyncmem.pool.pool import AsyncMemoryPool
    from asyncmem.pool.share import Share
    from asyncmem.pool.waiting import Waiting


class HostFallback:
    """A host pool that stands in for another, made at the first need."""

    def __init__(self, pool: AsyncMemoryPool) -> None:
        self._for: weakref.ref[Share] = weakref.ref(pool)
        self._name = f"{pool.name} on the host"
        self._making = threading.Lock()
        self._pool: AsyncMemoryPool | None = None

    def serve(self, waiting: Waiting) -> Buffer | Batch:
        """Answer what a request asked for, from host memory (blocks for as long as that takes to map)."""
        from asyncmem.pool.pool import AsyncMemoryPool

        with self._making:
            if self._pool is None:
                self._pool = AsyncMemoryPool("host", name=self._name, segments="auto")
                self._pool.fallback_of = self._for
        return self._pool.serve_blocking(waiting.sizes, batch=waiting.batch, tag=waiting.tag)

    async def aclose(self, timeout: float) -> None:
        """Close the host pool with the one that it stands in for; its buffers stay valid until they are freed."""
        if self._pool is not None:
            await self._pool.aclose(timeout)

    def close(self, timeout: float) -> None:
        """Close it from synchronous code (blocks for at most `timeout` seconds)."""
        if self._pool is not None:
            self._pool.close(timeout)
