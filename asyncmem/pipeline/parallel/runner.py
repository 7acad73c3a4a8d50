"""`PipelineParallel`: a model cut into stages, through which micro-batches go forward and backward."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from asyncmem.core import GRANULE
from asyncmem.errors import InvalidRequest
from asyncmem.pipeline.parallel.memory import check_room, needs_of
from asyncmem.pipeline.parallel.report import measure
from asyncmem.pipeline.parallel.run import Run, StageRun, Streams
from asyncmem.pipeline.parallel.schedule import SCHEDULES
from asyncmem.pipeline.resources import BorrowedStreams, pool_of
from asyncmem.pipeline.shares import reserve_ranges
from asyncmem.pool import AsyncMemoryPool
from asyncmem.pool.share import Share
from asyncmem.units import parse_count, parse_duration

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from asyncmem.pipeline.parallel.memory import StageNeeds
    from asyncmem.pipeline.parallel.report import ParallelReport
    from asyncmem.pipeline.parallel.schedule import Schedule
    from asyncmem.pipeline.parallel.stage import ParallelStage
    from asyncmem.pool import Lease


class PipelineParallel:
    """Takes micro-batches through the stages of a model: ``results = await parallel.run(micro_batches)``.

    Each stage has a stream for its work and one for copies to its neighbours, on the device of its pool. What is behind
    what is said to the streams, so the event loop waits for a device only to be no more than `ahead` steps before it.
    How much memory a stage may have follows from the schedule and from what the stage states; it has that and no more.

    Args:
        stages: The stages in order.
        pools: One pool for all, or one for each stage. Pools of different devices must let each other's streams in
            (option `peers`). A run begins once as much as it needs is free, in one piece for each stage.
        schedule: "1f1b", or "gpipe" which keeps all micro-batches.
        timeout: The most seconds that a step may take, to be queued and again to be done; None for no bound.
        ahead: How many steps a stage may have queued that its device has not done; None for no bound.

    Raises:
        InvalidRequest: There is no stage, or an argument cannot be right.
    """

    def __init__(
        self,
        stages: Sequence[ParallelStage],
        pools: Share | Sequence[Share],
        *,
        schedule: Literal["1f1b", "gpipe"] = "1f1b",
        timeout: float | str | None = None,
        ahead: int | None = 4,
    ) -> None:
        if not stages:
            raise InvalidRequest("stages", stages, "at least one")
        if schedule not in SCHEDULES:
            raise InvalidRequest("schedule", schedule, f"one of {sorted(SCHEDULES)}")
        self._stages = list(stages)
        self._names = [stage.name or f"stage {at}" for at, stage in enumerate(stages)]
        self._pools: list[Share] = list(pools) if isinstance(pools, list | tuple) else [pools] * len(stages)  # type: ignore[list-item]  # a share is no sequence
        for pool in self._pools:
            if not isinstance(pool, Share):
                raise InvalidRequest("pools", pool, "a pool or a budget, or one for each stage")
        if len(self._pools) != len(stages):
            raise InvalidRequest("pools", len(self._pools), f"one, or one for each of {len(stages)} stages")
        self._schedule = SCHEDULES[schedule]
        self._schedule_name = schedule
        self._timeout = None if timeout is None else parse_duration(timeout)
        self._ahead = None if ahead is None else parse_count(ahead, what="ahead", least=1)
        self._streams: list[Streams] = []
        self._running = False
        self._report: ParallelReport | None = None

    def __repr__(self) -> str:
        return f"<asyncmem.PipelineParallel {self._schedule_name}: {' -> '.join(self._names)}>"

    async def run(self, micro_batches: Iterable[object]) -> list[Any]:
        """Take all micro-batches forward and backward, and return the outputs of the last stage's forwards, in order.

        Buffers among the micro-batches are of the first stage's device and stay the caller's; they are in order there.

        Raises:
            InvalidRequest: A pool has too little memory for what the schedule keeps; the text has the sum. Or it runs.
            StepError: A step raised or took too long, or its device failed. It says which; all memory is free then.

        Cancelled: all steps are, and all memory is free.
        """
        items = list(micro_batches)
        if self._running:
            raise InvalidRequest("run()", self, "one run at a time")
        if not items:
            return []
        self._running = True
        stage_runs: list[StageRun] = []
        try:
            schedule = self._schedule(len(self._stages), len(items))
            needs = await self._prepare(schedule)
            stage_runs += await self._stage_runs(needs)
            results = await Run(schedule, stage_runs, items, timeout=self._timeout, ahead=self._ahead).main()
            self._report = measure(schedule, stage_runs)
            return results
        finally:
            self._running = False
            for stage_run in stage_runs:
                stage_run.close()

    def needs(self, micro_batches: int) -> tuple[int, ...]:
        """Return how many bytes each stage would need for so many micro-batches."""
        return tuple(one.total for one in self._needs(self._schedule(len(self._stages), micro_batches)))

    def report(self) -> ParallelReport:
        """Return the figures of the last run that came to its end."""
        if self._report is None:
            raise InvalidRequest("report()", self, "a run that came to its end")
        return self._report

    def _needs(self, schedule: Schedule) -> list[StageNeeds]:
        return needs_of(self._stages, self._names, schedule)

    async def _stage_runs(self, needs: Sequence[StageNeeds]) -> list[StageRun]:
        """Wait for all stages' memory, one pool after the other. All runs have one order, so none holds up another."""
        leases: dict[int, Lease] = {}
        try:
            for pool in sorted(dict.fromkeys(self._pools), key=id):
                its = [at for at, other in enumerate(self._pools) if other is pool]
                sizes = [max(needs[at].total, GRANULE) for at in its]
                leases |= zip(its, await reserve_ranges(pool, sizes, "pipeline parallel"), strict=True)
        except BaseException:
            for lease in leases.values():
                lease.__exit__(None, None, None)
            raise
        return [StageRun(stage, needs[at], self._streams[at], leases[at]) for at, stage in enumerate(self._stages)]

    async def _prepare(self, schedule: Schedule) -> list[StageNeeds]:
        """Open the pools, see that there is room, and make the streams once."""
        needs = self._needs(schedule)
        for pool in self._pools:
            if isinstance(pool, AsyncMemoryPool):
                await pool.open()
        for pool in dict.fromkeys(self._pools):
            check_room((one for one, its in zip(needs, self._pools, strict=True) if its is pool), pool.capacity())
        if not self._streams:
            self._borrowed = [BorrowedStreams(pool_of(pool)) for pool in self._pools]
            self._streams = [
                Streams.of(borrowed, name) for borrowed, name in zip(self._borrowed, self._names, strict=True)
            ]
        return needs
