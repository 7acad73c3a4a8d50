"""Which step each stage takes when: GPipe, 1F1B and eager 1F1B, as plain data.

A step is the forward or the backward of one micro-batch at one stage. A stage takes its steps one after the other; a
forward needs that of the stage before, a backward that of the stage behind. What follows from that alone is here: how
many micro-batches a stage keeps at most, and how long the whole takes if nothing but this order holds it up. Beside it
is what a run came to.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from asyncmem.errors import InvalidRequest
from asyncmem.pipeline.report import ParallelReport, ParallelStageReport

if TYPE_CHECKING:
    from asyncmem.pipeline.parallel.stage_run import StageRun


@dataclass(frozen=True, slots=True)
class Step:
    """The forward or the backward of one micro-batch, at the stage whose list it is in."""

    forward: bool
    """Whether it is the forward."""
    micro_batch: int
    """The number of the micro-batch, counted from 0."""

    def __str__(self) -> str:
        return f"{'forward' if self.forward else 'backward'} of micro-batch {self.micro_batch}"


@dataclass(frozen=True, slots=True)
class Schedule:
    """The steps of all stages, each stage's in its order."""

    name: str
    """What it is called: "1f1b", "eager" or "gpipe"."""
    micro_batches: int
    """How many micro-batches go through."""
    steps: tuple[tuple[Step, ...], ...]
    """The steps, by stage."""

    def live(self, stage: int) -> int:
        """Return the most micro-batches that are between their forward and the end of their backward at a stage."""
        most = now = 0
        for step in self.steps[stage]:
            most = max(most, now + step.forward)
            now += 1 if step.forward else -1
        return most

    def makespan(self, forward: Sequence[float], backward: Sequence[float]) -> float:
        """Return the seconds that it takes, given those of each stage's forward and backward.

        Raises:
            InvalidRequest: The order is one in which stages wait for each other for ever.
        """
        return max(end for _, _, _, end in self.course(forward, backward))

    def bubble(self, forward: Sequence[float], backward: Sequence[float]) -> float:
        """Return the share of all stages' time in which they have nothing to do."""
        whole = len(self.steps) * self.makespan(forward, backward)
        return 1 - self.micro_batches * (sum(forward) + sum(backward)) / whole if whole else 0.0

    def course(self, forward: Sequence[float], backward: Sequence[float]) -> Iterator[tuple[int, Step, float, float]]:
        """Yield the stages' steps as they can be taken, with the seconds at which each begins and ends.

        Raises:
            InvalidRequest: The order is one in which stages wait for each other for ever.
        """
        last = len(self.steps) - 1
        ends: dict[tuple[int, Step], float] = {}
        free = [0.0] * (last + 1)
        taken = [0] * (last + 1)
        while len(ends) < sum(map(len, self.steps)):
            before = len(ends)
            for stage, steps in enumerate(self.steps):
                while taken[stage] < len(steps):
                    step = steps[taken[stage]]
                    needed = needed_by(stage, step, last)
                    if needed is not None and needed not in ends:
                        break
                    begin = max(free[stage], 0.0 if needed is None else ends[needed])
                    end = begin + (forward if step.forward else backward)[stage]
                    ends[stage, step] = free[stage] = end
                    taken[stage] += 1
                    yield stage, step, begin, end
            if len(ends) == before:
                raise InvalidRequest("schedule", self.name, "an order in which no stage waits for itself")


def needed_by(stage: int, step: Step, last: int) -> tuple[int, Step] | None:
    """Return whose step must be over before a stage can take its own; None for no other stage's."""
    if step.forward:
        return None if stage == 0 else (stage - 1, step)
    return (stage, Step(forward=True, micro_batch=step.micro_batch)) if stage == last else (stage + 1, step)


def gpipe(stages: int, micro_batches: int) -> Schedule:
    """Make the schedule of all forwards before all backwards: each stage keeps all micro-batches."""
    return _schedule("gpipe", micro_batches, [micro_batches] * stages)


def one_forward_one_backward(stages: int, micro_batches: int) -> Schedule:
    """Make the schedule of as many forwards as stages follow, and then a backward after each forward.

    It takes as long as GPipe's, and a stage keeps at most as many micro-batches as it and the stages behind it are.
    """
    return _schedule("1f1b", micro_batches, [min(stages - stage, micro_batches) for stage in range(stages)])


def eager(stages: int, micro_batches: int) -> Schedule:
    """Make the schedule of 1F1B with a forward more, before the first backward, for each stage that follows.

    So each stage has another step to take while what it sends is on its way, and that costs no time. A stage keeps up
    to twice as many micro-batches as it and the stages behind it are, less one.
    """
    live = [min(2 * (stages - stage) - 1, micro_batches) for stage in range(stages)]
    return _schedule("eager", micro_batches, live)


SCHEDULES: dict[str, Callable[[int, int], Schedule]] = {
    "1f1b": one_forward_one_backward,
    "eager": eager,
    "gpipe": gpipe,
}
"""The schedules by their names: functions of the numbers of stages and of micro-batches."""


def _schedule(name: str, micro_batches: int, live: Sequence[int]) -> Schedule:
    return Schedule(name, micro_batches, tuple(tuple(_order(micro_batches, most)) for most in live))


def _order(micro_batches: int, live: int) -> Iterator[Step]:
    """Yield the steps of a stage that keeps `live` micro-batches: as many forwards, then both in turns."""
    for number in range(live):
        yield Step(True, number)
    for number in range(micro_batches):
        yield Step(False, number)
        if number + live < micro_batches:
            yield Step(True, number + live)


# -- what became of it -------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class StageTally:
    """What a stage's steps came to. Seconds; times are of a clock that all processes of a host have in common."""

    name: str
    device: str
    peak: int
    bound: int
    first: float
    end: float
    forward: float = 0.0
    backward: float = 0.0
    copying: float = 0.0
    exposed: float = 0.0

    @property
    def busy(self) -> float:
        """What all steps took."""
        return self.forward + self.backward


def measure(schedule: Schedule, tallies: Sequence[StageTally]) -> ParallelReport:
    """Return the figures of a run that came to its end."""
    seconds = max(one.end for one in tallies) - min(one.first for one in tallies)
    whole = max(seconds, 1e-12)
    count = schedule.micro_batches
    forward, backward = [one.forward / count for one in tallies], [one.backward / count for one in tallies]
    copying = sum(one.copying for one in tallies)
    return ParallelReport(
        schedule=schedule.name,
        micro_batches=count,
        stages=tuple(
            ParallelStageReport(
                name=one.name,
                device=one.device,
                forward_s=forward[at],
                backward_s=backward[at],
                busy=min(one.busy / whole, 1.0),
                live=schedule.live(at),
                peak_bytes=one.peak,
                bound_bytes=one.bound,
            )
            for at, one in enumerate(tallies)
        ),
        seconds=seconds,
        bubble=max(1 - sum(one.busy for one in tallies) / (whole * len(tallies)), 0.0),
        least_bubble=schedule.bubble(forward, backward),
        transfer_s=copying,
        overlap=max(1 - sum(one.exposed for one in tallies) / copying, 0.0) if copying else 1.0,
    )


def tally(stage_run: "StageRun") -> StageTally:
    """Time a stage's steps: each begins once the one before it is over and its input has come."""
    steps = stage_run.queued
    end = copied = steps[0].called
    found = StageTally(
        stage_run.name, stage_run.device.name, stage_run.peak(), stage_run.needs.total, first=end, end=end
    )
    for step in steps:
        begin = max(end, step.called)
        if step.taken is not None:
            begin = max(begin, step.taken.arrived.at)
            found.exposed += max(0.0, step.taken.arrived.at - max(end, step.taken.source.at))
        if step is steps[0]:
            found.first = begin
        end = found.end = max(begin, step.ended.at)
        if step.step.forward:
            found.forward += end - begin
        else:
            found.backward += end - begin
        if step.sent is not None:
            found.copying += max(step.sent.arrived.at - max(copied, end), 0.0)
            copied = step.sent.arrived.at
    return found
