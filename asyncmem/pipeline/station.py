"""A stage at its place in a pipeline: its share, its stream, and what it has done."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import anyio

from asyncmem.figures import format_duration
from asyncmem.pipeline.report import StageReport

if TYPE_CHECKING:
    from asyncmem.devices import Stream
    from asyncmem.pipeline.plan import AnyStage, Quota
    from asyncmem.pipeline.share import StageShare


@dataclass(slots=True)
class Station:
    """What the workers of one stage have in common.

    Attributes:
        stage: The stage.
        quota: Its part of the plan.
        share: What it allocates from.
        items: Items finished.
        at_work: How many of its workers have an item now.
        inside: Seconds that its workers spent inside its function, on items that are finished.
    """

    stage: AnyStage
    quota: Quota
    share: StageShare
    items: int = 0
    at_work: int = 0
    inside: float = 0.0

    @property
    def stream(self) -> Stream | None:
        """Where it queues its work; None where it named no stream."""
        return self.share.stream

    async def limited(self, item: object) -> object:
        """Call the stage's function under its time limit.

        Raises:
            TimeoutError: It took longer, and was cancelled.
        """
        seconds = self.stage.timeout
        with anyio.move_on_after(seconds) as limit:
            return await self.stage.function(item, self.share)
        assert limit.cancelled_caught
        raise TimeoutError(f"it took longer than {format_duration(seconds or 0.0)}")

    def report(self, seconds: float) -> StageReport:
        """Answer its figures for a pipeline that ran for so many seconds."""
        stats = self.share.stats()
        whole = max(seconds * self.stage.workers, 1e-12)
        inside = min(self.inside / whole, 1.0)
        waiting = min(stats.wait_seconds / whole, inside)
        return StageReport(
            name=self.stage.name,
            workers=self.stage.workers,
            items=self.items,
            items_per_s=self.items / seconds if seconds else 0.0,
            busy=inside - waiting,
            waiting_for_memory=waiting,
            waiting_for_input=1.0 - inside,
            peak_bytes=stats.peak_allocated,
            kept_bytes=self.quota.kept,
        )
