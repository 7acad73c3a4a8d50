"""What a run came to, beside what its schedule could come to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from asyncmem.figures import format_count, format_duration, format_share, format_size
from asyncmem.pipeline.report import table
from asyncmem.text import printable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asyncmem.pipeline.parallel.run import StageRun, Timestamp
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
        return "\n".join([self.headline(), *table([_HEAD, *map(_cells, self.stages)], left=2)])

    def headline(self) -> str:
        """Return one line on the run."""
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
    """What the steps of one stage add up to, in seconds."""

    forward: float = 0.0
    backward: float = 0.0
    first: float = 0.0
    end: float = 0.0
    copying: float = 0.0
    exposed: float = 0.0


def measure(schedule: Schedule, stage_runs: Sequence[StageRun]) -> ParallelReport:
    """Return the figures of a run that is over."""
    tallies = [_tally(stage_run) for stage_run in stage_runs]
    seconds = max(one.end for one in tallies) - min(one.first for one in tallies)
    whole = max(seconds * len(stage_runs), 1e-12)
    count = schedule.micro_batches
    forward = [one.forward / count for one in tallies]
    backward = [one.backward / count for one in tallies]
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
                busy=min((tallies[at].forward + tallies[at].backward) / max(seconds, 1e-12), 1.0),
                live=schedule.live(at),
                peak_bytes=stage_run.peak(),
                bound_bytes=stage_run.needs.total,
            )
            for at, stage_run in enumerate(stage_runs)
        ),
        seconds=seconds,
        bubble=max(1 - sum(one.forward + one.backward for one in tallies) / whole, 0.0),
        least_bubble=schedule.bubble(forward, backward),
        transfer_s=copying,
        overlap=max(1 - sum(one.exposed for one in tallies) / copying, 0.0) if copying else 1.0,
    )


def _tally(stage_run: StageRun) -> _Tally:
    """Go through a stage's steps: each begins once the one before it is over and what it takes has come."""
    tally = _Tally(first=max(stage_run.queued[0].called, _at(stage_run.queued[0].arrived, 0.0)))
    end = copied = stage_run.queued[0].called
    for queued in stage_run.queued:
        arrived = _at(queued.arrived, queued.called)
        begin = max(end, queued.called, arrived)
        tally.exposed += max(0.0, arrived - max(end, _at(queued.source, arrived)))
        lasted = max(_at(queued.ended, begin) - begin, 0.0)
        if queued.step.forward:
            tally.forward += lasted
        else:
            tally.backward += lasted
        end = begin + lasted
        if queued.sent is not None:
            sent = _at(queued.sent, end)
            tally.copying += max(sent - max(copied, end), 0.0)
            copied = sent
    tally.end = end
    return tally


def _at(timestamp: Timestamp | None, otherwise: float) -> float:
    return otherwise if timestamp is None or timestamp.at is None else timestamp.at
