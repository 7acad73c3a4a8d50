"""A stage at its place in a pipeline: its share, its stream, and what it has done."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import anyio

from asyncmem.figures import format_duration
from asyncmem.pipeline.report import StageReport
from asyncmem.pipeline.share import Region, StageLease

if TYPE_CHECKING:
    from collections.abc import Callable

    from asyncmem.devices import Stream
    from asyncmem.pipeline.plan import AnyStage, Quota
    from asyncmem.pipeline.share import StageBudget, StageShare


@dataclass(slots=True)
class Station:
    """What the workers of one stage have in common.

    Attributes:
        stage: The stage.
        quota: Its part of the plan.
        share: What it allocates from, or what the lease of each item comes from.
        items: Items finished.
        at_work: How many of its workers have an item now.
        inside: Seconds that its workers spent inside its function, on items that are finished.
        held_back: Seconds that they had no item because no more might be under way, or the source had no more.
    """

    stage: AnyStage
    quota: Quota
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
        """Answer its figures for a pipeline that ran for so many seconds."""
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
            kept_bytes=self.quota.kept,
        )
