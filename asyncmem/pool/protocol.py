"""The one shape that pool, budget and lease share, for code that takes any of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import Awaitable, Iterable, Sequence

    from asyncmem.core import Array, Batch, Buffer
    from asyncmem.stats import PoolStats, WaiterInfo
    from asyncmem.units import Size


@runtime_checkable
class MemoryShare(Protocol):
    """Where memory is had from: a pool, a budget or a lease. Each method is described at `AsyncMemoryPool`."""

    name: str

    def allocate(
        self, size: Size, *, stream: object = None, tag: str | None = None, priority: int = 0,
        timeout: float | None = None,
    ) -> Buffer:  # fmt: skip
        """Answer a buffer now, or block this thread until `timeout`."""

    def allocate_async(
        self, size: Size, *, stream: object = None, tag: str | None = None, priority: int = 0,
        timeout: float | None = None,
    ) -> Awaitable[Buffer]:  # fmt: skip
        """Start a request for a buffer, to be awaited or entered."""

    def allocate_batch(
        self, sizes: Iterable[Size], *, stream: object = None, tag: str | None = None, priority: int = 0,
        timeout: float | None = None,
    ) -> Awaitable[Batch]:  # fmt: skip
        """Start a request for several buffers, all or nothing."""

    def try_allocate(self, size: Size, *, stream: object = None, tag: str | None = None) -> Buffer | None:
        """Answer a buffer if that takes no waiting and overtakes nobody."""

    async def empty(self, shape: int | Sequence[int], dtype: object = "float32", *, stream: object = None) -> Array:
        """Allocate a typed array."""

    def lease(self, size: Size) -> MemoryShare:
        """Promise one contiguous range."""

    def budget(self, name: str, *, limit: Size) -> MemoryShare:
        """Make a share with a limit of its own."""

    def stats(self) -> PoolStats:
        """Answer the figures of this moment."""

    def waiters(self) -> tuple[WaiterInfo, ...]:
        """Answer who waits for how much."""
