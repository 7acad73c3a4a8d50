"""What a run came to, beside what its schedule could come to."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from asyncmem.figures import format_count, format_duration, format_share, format_size
from asyncmem.pipeline.report import table
from asyncmem.text import printable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asyncmem.pipeline.parallel.run import QueuedStep, StageRun
    from asyncmem.pipeline.parallel.schedule import Schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelStageReport:
    """One stage's figures."""

    name: str
    """The stage's name."""
    device: str
    """Where it ran."""
    forward_s: float
    """Seconds that a forward took, on the average."""
    backward_s: float
    """Seconds that a backward took, on the average."""
    busy: float
    """The share of the run's time in which it was at work."""
    live: int
    """The most micro-batches that the schedule lets it keep."""
    peak_bytes: int
    """The most bytes that were used of what it had, summed over its parts."""
    bound_bytes: int
    """What it had: all that it may hold, by the schedule and by what it states."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelReport:
    """What a run of `PipelineParallel` came to; printed, a table."""

    schedule: str
    """The schedule's name."""
    micro_batches: int
    """How many micro-batches went through."""
    stages: tuple[ParallelStageReport, ...]
    """The stages in order."""
    seconds: float
    """From the first step's beginning to the last one's end."""
    bubble: float
    """The share of all stages' time in which they were idle."""
    least_bubble: float
    """The same if only the schedule had held them up, with steps as long as they were on the average."""
    transfer_s: float
    """Seconds of copying between stages, in sum."""
    overlap: float
    """The share of those seconds in which nothing waited for them."""

    def __str__(self) -> str:
        """Lay the figures out as a table."""
        return "\n".join([self._headline(), *table([_HEAD, *map(_cells, self.stages)], left=2)])

    def _headline(self) -> str:
        done = f"{self.schedule}: {format_count(self.micro_batches, 'micro-batch', 'micro-batches')}"
        bubble = f"bubble {format_share(self.bubble)}, at least {format_share(self.least_bubble)}"
        copies = f"{format_share(self.overlap)} of {format_duration(self.transfer_s)} of copies overlapped"
        return f"{done} in {format_duration(self.seconds)}, {bubble}, {copies}"


_HEAD = ("stage", "device", "forward", "backward", "busy", "keeps", "peak", "bound")


def _cells(stage: ParallelStageReport) -> tuple[str, ...]:
    return (
        printable(stage.name),
        printable(stage.device),
        format_duration(stage.forward_s),
        format_duration(stage.backward_s),
        format_share(stage.busy),
        str(stage.live),
        format_size(stage.peak_bytes),
        format_size(stage.bound_bytes),
    )


@dataclass(slots=True)
class _Tally:
    """When a stage began and ended, and what its steps add up to, in seconds; those forward are under True."""

    first: float
    end: float
    steps: dict[bool, float] = field(default_factory=lambda: {True: 0.0, False: 0.0})
    copying: float = 0.0
    exposed: float = 0.0

    @property
    def busy(self) -> float:
        """What all steps took."""
        return sum(self.steps.values())


def measure(schedule: Schedule, stage_runs: Sequence[StageRun]) -> ParallelReport:
    """Return the figures of a run that came to its end."""
    tallies = [_tally(stage_run.queued) for stage_run in stage_runs]
    seconds = max(one.end for one in tallies) - min(one.first for one in tallies)
    whole = max(seconds, 1e-12)
    count = schedule.micro_batches
    forward, backward = ([one.steps[way] / count for one in tallies] for way in (True, False))
    copying = sum(one.copying for one in tallies)
    return ParallelReport(
        schedule=schedule.name,
        micro_batches=count,
        stages=tuple(
            ParallelStageReport(
                name=stage_run.name,
                device=stage_run.device.name,
                forward_s=forward[at],
                backward_s=backward[at],
                busy=min(tallies[at].busy / whole, 1.0),
                live=schedule.live(at),
                peak_bytes=stage_run.peak(),
                bound_bytes=stage_run.needs.total,
            )
            for at, stage_run in enumerate(stage_runs)
        ),
        seconds=seconds,
        bubble=max(1 - sum(one.busy for one in tallies) / (whole * len(stage_runs)), 0.0),
        least_bubble=schedule.bubble(forward, backward),
        transfer_s=copying,
        overlap=max(1 - sum(one.exposed for one in tallies) / copying, 0.0) if copying else 1.0,
    )


def _tally(steps: Sequence[QueuedStep]) -> _Tally:
    """Go through a stage's steps: each begins once the one before it is over and what it takes has come."""
    end = copied = steps[0].called
    tally = _Tally(first=end, end=end)
    for step in steps:
        begin = max(end, step.called)
        if step.taken is not None:
            begin = max(begin, step.taken.arrived.at)
            tally.exposed += max(0.0, step.taken.arrived.at - max(end, step.taken.source.at))
        if step is steps[0]:
            tally.first = begin
        end = tally.end = max(begin, step.ended.at)
        tally.steps[step.step.forward] += end - begin
        if step.sent is not None:
            tally.copying += max(step.sent.arrived.at - max(copied, end), 0.0)
            copied = step.sent.arrived.at
    return tally
