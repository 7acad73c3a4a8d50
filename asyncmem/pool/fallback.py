"""Buffers on the host for requests that their device has no memory for (``fallback="host"``)."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from asyncmem.pool.beside import HostPool

if TYPE_CHECKING:
    from asyncmem.pool.pool import AsyncMemoryPool


class HostFallback(HostPool):
    """A pool of ordinary memory, whose buffers know where they were wanted."""

    def _make(self, pool: AsyncMemoryPool) -> AsyncMemoryPool:
        from asyncmem.pool.pool import AsyncMemoryPool

        made = AsyncMemoryPool("host", name=self.name, segments="auto")
        made._fallback_of = weakref.ref(pool)
        return made
