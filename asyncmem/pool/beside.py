"""A pool of the host's memory beside a pool: made at the first need, closed with it."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from asyncmem.errors import PoolClosed

if TYPE_CHECKING:
    from asyncmem.pool.pool import AsyncMemoryPool


class HostPool(ABC):
    """The life of such a pool; kinds of them say what is made.

    Args:
        name: What it is called.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._turn = threading.Lock()
        self._pool: AsyncMemoryPool | None = None
        self._closed = False

    @abstractmethod
    def _make(self, pool: AsyncMemoryPool) -> AsyncMemoryPool:
        """Make the host pool of `pool`."""

    def of(self, pool: AsyncMemoryPool) -> AsyncMemoryPool:
        """Answer the host pool of `pool`, whose part this is.

        Raises:
            PoolClosed: It has been closed.
            InvalidRequest: The device has no such memory.
        """
        with self._turn:
            if self._closed:
                raise PoolClosed(self.name)
            if self._pool is None:
                made = self._make(pool)
                made._worker_factory = pool._worker_factory
                self._pool = made
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
        with self._turn:
            self._closed = True
            return self._pool
