"""How much memory each stage needs: what its schedule keeps at once, times what it says a micro-batch takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from asyncmem.errors import Described, InvalidRequest
from asyncmem.figures import format_size

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from asyncmem.pipeline.parallel.schedule import Schedule
    from asyncmem.pipeline.parallel.stage import ParallelStage

LANDING = 2
"""Gradients that a stage has room for: one at hand, and one that comes meanwhile."""

LEAVING = 2
"""Answers that it has room for: one that is being made, and one that is copied meanwhile."""


@dataclass(frozen=True, slots=True)
class Part:
    """So many pieces of so many bytes, and what they are."""

    count: int
    nbytes: int
    what: str

    @property
    def total(self) -> int:
        """All of them together, in bytes."""
        return self.count * self.nbytes

    def __str__(self) -> str:
        return f"{self.count} x {format_size(self.nbytes)} {self.what}"


@dataclass(frozen=True, slots=True)
class Needs:
    """The most that a stage holds at once."""

    name: str
    saved: Part
    working: Part
    answers: Part
    results: Part
    inputs: Part
    gradients: Part

    @property
    def parts(self) -> tuple[Part, ...]:
        """What its steps allocate, and what comes from its neighbours."""
        return (self.saved, self.working, self.answers, self.results, self.inputs, self.gradients)

    @property
    def total(self) -> int:
        """All of it, in bytes."""
        return sum(part.total for part in self.parts)

    def __str__(self) -> str:
        text = " + ".join(str(part) for part in self.parts if part.total)
        return f"{self.name}: {text or 'nothing'} = {format_size(self.total)}"


def needs_of(stages: Sequence[ParallelStage], names: Sequence[str], schedule: Schedule) -> list[Needs]:
    """Answer what each stage needs.

    A stage's input lies with it from the forward of the stage before until its own backward. The stage before begins
    no further micro-batch until the backward of its oldest, so that many inputs are there at most, and none of them
    is ever waited for. Gradients have two places; the stage behind waits for one only until this one's backward has
    been queued, and not until it is done. The last stage's answers are gradients alone, as its outputs are results;
    where there is no other stage, they are dropped, and yet have a place.
    """
    last = len(stages) - 1
    found = []
    for at, stage in enumerate(stages):
        live = schedule.live(at)
        before = stages[at - 1].output if at else 0
        answer = before if 0 < at == last else max(stage.output, before)
        found.append(
            Needs(
                names[at],
                saved=Part(live, stage.saved, "saved"),
                working=Part(1, stage.working, "working"),
                answers=Part(LEAVING, answer, "answers"),
                results=Part(schedule.micro_batches if at == last else 0, stage.output, "results"),
                inputs=Part(schedule.live(at - 1) if at else 0, before, "inputs"),
                gradients=Part(min(LANDING, live) if at < last else 0, stage.output, "gradients"),
            )
        )
    return found


def need_room(needs: Iterable[Needs], capacity: int) -> None:
    """Raise where a pool of that capacity has no room for the stages that are on it.

    Raises:
        InvalidRequest: The text has the sum.
    """
    needs = list(needs)
    total = sum(one.total for one in needs)
    if total > capacity:
        least = f"at least {format_size(total)}: {'; '.join(map(str, needs))}"
        raise InvalidRequest("limit", Described(format_size(capacity)), least)
