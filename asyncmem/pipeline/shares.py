"""What a stage of an open pipeline has: its share of memory, its stream, and its figures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic

import anyio

from asyncmem.devices.base import OptionalStreamT_co
from asyncmem.figures import format_duration
from asyncmem.pipeline.report import StageReport
from asyncmem.pool import Budget, Lease
from asyncmem.pool.share import Share

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from asyncmem.core import Batch, Buffer, Ready, Request
    from asyncmem.devices import Stream
    from asyncmem.pipeline.plan import AnyStage, StagePlan


class StageShare(Share, Generic[OptionalStreamT_co]):
    """A stage's share of its pipeline's memory, whose buffers are at home on the stage's stream.

    It has all the ways to allocate that a pool has. For a stage with credit it is a lease of so many bytes, a new one
    for each item: nothing waits in it, and what is above the credit raises `OutOfMemoryError`.

    `StageShare[HostStream]` tells type checkers which streams the device has.

    Attributes:
        stream: Where the stage queues its work; None where it named none.
    """

    stream: OptionalStreamT_co

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


class StageBudget(StageShare["Stream | None"], Budget):
    """The share of a stage that has not said what it needs."""

    def __init__(
        self, parent: Share, name: str, limit: int, stream: Stream | None, *, waits: bool | None = None
    ) -> None:
        """Not made by users; see `Pipeline`."""
        super().__init__(parent, name, limit, waits=waits)
        self.stream = stream


class StageLease(StageShare["Stream | None"], Lease):
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

    def __init__(self, lease: Lease, name: str, stream: Stream | None) -> None:
        """Take a lease that has been entered."""
        super().__init__(lease, name, lease.nbytes, stream, waits=True)
        self._lease = lease

    def room(self) -> int:
        """Return the bytes that no item holds."""
        return self._lease.nbytes - self.stats().allocated_bytes

    def _end(self) -> None:
        """End the region and its lease; buffers still held become ordinary buffers of the pool."""
        super()._end()
        self._lease._end()


async def reserve_ranges(parent: Share, sizes: Sequence[int], tag: str) -> list[Lease]:
    """Wait for ranges of memory, all or none, so that none is held during the wait; return their leases.

    Cancelled: nothing was taken.
    """
    leases = [parent.lease(nbytes) for nbytes in sizes]
    if leases:
        batch = await parent.allocate_batch(sizes, tag=tag)
        for lease, buffer in zip(leases, batch, strict=True):
            lease._enter(buffer)
    return leases


@dataclass(slots=True)
class ActiveStage:
    """A stage of an open pipeline: what its workers have in common.

    Attributes:
        stage: The stage.
        plan: Its part of the plan.
        share: What it allocates from, or what the lease of each item comes from.
        items: Items finished.
        at_work: How many of its workers have an item now.
        inside: Seconds that its workers spent inside its function, on items that are finished.
        held_back: Seconds that they had no item because no more might be under way, or the source had no more.
    """

    stage: AnyStage
    plan: StagePlan
    share: StageBudget
    items: int = 0
    at_work: int = 0
    inside: float = 0.0
    held_back: float = 0.0

    @property
    def stream(self) -> Stream | None:
        """Where it queues its work; None where it named no stream."""
        return self.share.stream

    @property
    def calls_plainly(self) -> bool:
        """Whether an item takes nothing but the call of the stage's function with the share."""
        return self.stage.timeout is None and not isinstance(self.share, Region)

    async def call(self, item: object, begun: Callable[[], None]) -> object:
        """Call the stage's function, in a lease for the item and under its time limit, where it has them.

        Args:
            item: What the function is called with.
            begun: Called once the item has its lease.

        Raises:
            TimeoutError: It took longer, and was cancelled. What it waited for the lease does not count.
        """
        share, credit = self.share, self.stage.credit
        if not isinstance(share, Region) or credit is None:
            begun()
            return await self._limited(item, share)
        async with StageLease(share, credit) as lease:
            begun()
            return await self._limited(item, lease)

    async def _limited(self, item: object, share: StageShare) -> object:
        seconds = self.stage.timeout
        with anyio.move_on_after(seconds) as limit:
            return await self.stage.function(item, share)
        assert limit.cancelled_caught
        raise TimeoutError(f"it took longer than {format_duration(seconds or 0.0)}")

    def report(self, seconds: float) -> StageReport:
        """Return its figures for a pipeline that ran for so many seconds."""
        stats = self.share.stats()
        whole = max(seconds * self.stage.workers, 1e-12)
        inside = min(self.inside / whole, 1.0)
        waiting = min(stats.wait_seconds / whole, inside)
        held_back = min(self.held_back / whole, 1.0 - inside)
        return StageReport(
            name=self.stage.name,
            workers=self.stage.workers,
            items=self.items,
            items_per_s=self.items / seconds if seconds else 0.0,
            busy=inside - waiting,
            waiting_for_memory=waiting,
            waiting_for_input=1.0 - inside - held_back,
            held_back=held_back,
            peak_bytes=stats.peak_allocated,
            kept_bytes=self.plan.kept,
        )
