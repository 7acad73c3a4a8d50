"""The places of a stage: which of them a step has, and which one a neighbour's item lands in."""

from __future__ import annotations

from typing import TYPE_CHECKING

from asyncmem.pipeline.parallel.memory import Place, StepMemory

if TYPE_CHECKING:
    from asyncmem.pipeline.parallel.needs import Needs, Part
    from asyncmem.pipeline.parallel.schedule import Step
    from asyncmem.pool import Lease


class Places:
    """All that a stage needs, side by side in one lease.

    A schedule takes micro-batches back in the order in which it took them forward. So what is kept for them takes turns
    in as many places as there are at once: each has been left when it is needed again.

    Attributes:
        all: Every place.
    """

    def __init__(self, ground: Lease, needs: Needs) -> None:
        self._name = needs.name
        self.all: list[Place] = []

        def places(part: Part) -> list[Place]:
            made = [Place(ground, part.nbytes, f"{needs.name}: {part.what}") for _ in range(part.count)]
            self.all += made
            return made

        self._nothing = Place(ground, 0, "")
        self._saved = places(needs.saved)
        self._working = places(needs.working)
        self._answers = places(needs.answers)
        self._results = places(needs.results)
        self._inputs = places(needs.inputs)
        self._gradients = places(needs.gradients)

    def of(self, step: Step, number: int) -> StepMemory:
        """Answer what a step may allocate from, which is the stage's so many-th, counted from 0."""
        results = bool(self._results) and step.forward
        saved = _turn(self._saved, step.micro_batch) if step.forward else self._nothing
        # The step before has the other place, from which its answer may still be copied.
        output = self._results[step.micro_batch] if results else _turn(self._answers, number)
        return StepMemory(self._name, {"saved": saved, "output": output, "working": self._working[0]}, results=results)

    def landing(self, step: Step) -> Place:
        """Answer where an item lies that comes with a step."""
        return _turn(self._inputs if step.forward else self._gradients, step.micro_batch)


def _turn(places: list[Place], number: int) -> Place:
    return places[number % len(places)]
