"""What a stage allocates from: a budget of what is left over, or for each item a lease from a region of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from asyncmem.pool import Budget, Lease
from asyncmem.pool.share import Share

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from asyncmem.core import Batch, Buffer, Ready, Request
    from asyncmem.devices import Stream


class StageShare(Share):
    """A stage's share of its pipeline's memory, whose buffers are at home on the stage's stream.

    It has all the ways to allocate that a pool has. For a stage with credit it is a lease of so many bytes, a new one
    for each item: nothing waits in it, and what is above the credit raises `OutOfMemoryError`.

    Attributes:
        stream: Where the stage queues its work; None where it named none.
    """

    stream: Stream | None = None

    def allocate(
        self, size: int | str, *, stream: object = None, tag: str | None = None, priority: int = 0,
        timeout: float | None = None,
    ) -> Buffer:  # fmt: skip
        """Allocate as `AsyncMemoryPool.allocate` does, on the stage's stream where none is named."""
        on = self.stream if stream is None else stream
        return super().allocate(size, stream=on, tag=tag, priority=priority, timeout=timeout)

    def allocate_async(
        self, size: int | str, *, stream: object = None, tag: str | None = None, priority: int = 0,
        timeout: float | None = None,
    ) -> Ready[Buffer] | Request[Buffer]:  # fmt: skip
        """Allocate as `AsyncMemoryPool.allocate_async` does, on the stage's stream where none is named."""
        on = self.stream if stream is None else stream
        return super().allocate_async(size, stream=on, tag=tag, priority=priority, timeout=timeout)

    def allocate_batch(
        self, sizes: Iterable[int | str], *, stream: object = None, tag: str | None = None, priority: int = 0,
        timeout: float | None = None,
    ) -> Ready[Batch] | Request[Batch]:  # fmt: skip
        """Allocate as `AsyncMemoryPool.allocate_batch` does, on the stage's stream where none is named."""
        on = self.stream if stream is None else stream
        return super().allocate_batch(sizes, stream=on, tag=tag, priority=priority, timeout=timeout)

    def try_allocate(self, size: int | str, *, stream: object = None, tag: str | None = None) -> Buffer | None:
        """Allocate as `AsyncMemoryPool.try_allocate` does, on the stage's stream where none is named."""
        return super().try_allocate(size, stream=self.stream if stream is None else stream, tag=tag)


class StageBudget(StageShare, Budget):
    """The share of a stage that has not said what it needs."""

    def __init__(
        self, parent: Share, name: str, limit: int, stream: Stream | None, *, waits: bool | None = None
    ) -> None:
        """Not made by users; see `Pipeline`."""
        super().__init__(parent, name, limit, waits=waits)
        self.stream = stream


class StageLease(StageShare, Lease):
    """The share of a stage for one item: all of its credit, at once and in one piece."""

    def __init__(self, region: Region, credit: int) -> None:
        """Not made by users; see `Pipeline`."""
        super().__init__(region, credit, stream=region.stream, tag=None, priority=0, timeout=None)
        self.stream = region.stream


class Region(StageBudget):
    """One range of memory for all items of a stage: a budget that waits for what becomes free there and nowhere else.

    So what is in pieces elsewhere is no matter. As an item takes its lease at once and in one piece, and earlier items
    leave, the range is whole again sooner or later; so every item gets its lease.
    """

    def __init__(self, ground: Lease, name: str, stream: Stream | None) -> None:
        """Take a lease that has been entered."""
        super().__init__(ground, name, ground.own_limit(), stream, waits=True)
        self._ground = ground

    def room(self) -> int:
        """Return the bytes that nobody holds."""
        return self.own_limit() - self._core.account(self._account).live

    def close(self) -> None:
        """End the region; buffers still held become ordinary buffers of the pool."""
        super().close()
        self._ground.__exit__(None, None, None)


async def ranges(parent: Share, sizes: Sequence[int], tag: str) -> list[Lease]:
    """Wait for ranges of memory, all or none, so that nobody holds some while waiting for others; answer their leases.

    Cancelled: nothing was taken.
    """
    leases = [parent.lease(nbytes) for nbytes in sizes]
    if leases:
        batch = await parent.allocate_batch(sizes, tag=tag)
        for lease, buffer in zip(leases, batch, strict=True):
            lease._enter(buffer)
    return leases
