"""A pool's page-locked host memory: pools of their own, whose buffers copies of the device read and write directly."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from asyncmem.pool.beside import HostPool

if TYPE_CHECKING:
    from asyncmem.pool.pool import AsyncMemoryPool

SHARE: Final = 0.25
"""Of the host's memory: what is page-locked is lost to everybody else."""


class PinnedMemory(HostPool):
    """A pool of what the device calls pinned.

    Args:
        name: What it is called.
        limit: The most that it may have, in bytes or as a share of the host's memory.
    """

    def __init__(self, name: str, limit: float = SHARE) -> None:
        super().__init__(name)
        self._limit = limit

    def resize(self, limit: float) -> None:
        """Change the limit, as `AsyncMemoryPool.resize` does."""
        with self._turn:
            self._limit = limit
            if self._pool is not None:
                self._pool.resize(limit=limit)

    def _make(self, pool: AsyncMemoryPool) -> AsyncMemoryPool:
        from asyncmem.pool.pool import AsyncMemoryPool

        # What the environment says of segments is meant for the device's own.
        return AsyncMemoryPool(pool.device.pinned(), name=self.name, limit=self._limit, segments="auto")
