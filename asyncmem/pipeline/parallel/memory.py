"""The memory of each stage: what it needs by its schedule, and a range of its own for each thing that it keeps."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias, get_args

import anyio

from asyncmem.core import GRANULE
from asyncmem.errors import Described, InvalidRequest
from asyncmem.figures import format_size
from asyncmem.pipeline.shares import Region
from asyncmem.pipeline.trees import buffers_except, buffers_in
from asyncmem.text import quoted

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from asyncmem.core import Buffer
    from asyncmem.devices import Stream
    from asyncmem.pipeline.parallel.schedule import Schedule, Step
    from asyncmem.pipeline.parallel.stage import ParallelStage
    from asyncmem.pool import Lease


GRADIENT_SLOTS = 2
"""Gradients that a stage has room for: the current one, and one that arrives meanwhile."""

OUTPUT_SLOTS = 2
"""Outputs that a stage has room for: one that is made, and one that is copied meanwhile."""


@dataclass(frozen=True, slots=True)
class Need:
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
class StageNeeds:
    """The most that a stage holds at once."""

    name: str
    saved: Need
    working: Need
    outputs: Need
    results: Need
    inputs: Need
    gradients: Need

    @property
    def parts(self) -> tuple[Need, ...]:
        """What its steps allocate, and what comes from its neighbours."""
        return (self.saved, self.working, self.outputs, self.results, self.inputs, self.gradients)

    @property
    def total(self) -> int:
        """All of it, in bytes."""
        return sum(part.total for part in self.parts)

    def __str__(self) -> str:
        text = " + ".join(str(part) for part in self.parts if part.total)
        return f"{self.name}: {text or 'nothing'} = {format_size(self.total)}"


def needs_of(stages: Sequence[ParallelStage], names: Sequence[str], schedule: Schedule) -> list[StageNeeds]:
    """Return what each stage needs.

    A stage's input lies with it from the forward of the stage before until its own backward. The stage before begins
    no further micro-batch until the backward of its oldest, so that many inputs are there at most, and none of them
    is ever waited for. Gradients have two slots; the stage behind waits for one only until this one's backward has
    been queued, and not until it is done. The last stage sends gradients alone, because its outputs are results;
    where there is no other stage, they are dropped, and yet have a slot.
    """
    last = len(stages) - 1
    found = []
    for at, stage in enumerate(stages):
        live = schedule.live(at)
        before = stages[at - 1].output if at else 0
        output = before if 0 < at == last else max(stage.output, before)
        found.append(
            StageNeeds(
                names[at],
                saved=Need(live, stage.saved, "saved"),
                working=Need(1, stage.working, "working"),
                outputs=Need(OUTPUT_SLOTS, output, "outputs"),
                results=Need(schedule.micro_batches if at == last else 0, stage.output, "results"),
                inputs=Need(schedule.live(at - 1) if at else 0, before, "inputs"),
                gradients=Need(min(GRADIENT_SLOTS, live) if at < last else 0, stage.output, "gradients"),
            )
        )
    return found


def check_room(needs: Iterable[StageNeeds], capacity: int) -> None:
    """Raise where a pool of that capacity has no room for the stages that are on it.

    Raises:
        InvalidRequest: The text has the sum.
    """
    needs = list(needs)
    total = sum(one.total for one in needs)
    if total > capacity:
        least = f"at least {format_size(total)}: {'; '.join(map(str, needs))}"
        raise InvalidRequest("limit", Described(format_size(capacity)), least)


Use: TypeAlias = Literal["saved", "output", "working"]
"""Which of the sizes that a stage states an allocation counts against."""


class Slot:
    """A range of memory for one thing at a time, which may be in several buffers.

    Its next user finds it free and in one piece. So as long as none of its buffers is freed before the last one
    is allocated, they fit, whatever their sizes are.

    Attributes:
        nbytes: The length of the range.
        peak: The most bytes of it that were held.
    """

    def __init__(self, lease: Lease, nbytes: int, name: str) -> None:
        """Take the next bytes of a lease; of none there is no range, and only buffers of no bytes."""
        self.nbytes = nbytes
        self.peak = 0
        self._region = Region(lease.lease(nbytes).__enter__(), name, None) if nbytes else None
        self._share = self._region or lease
        self._start = 0
        self._given: weakref.WeakSet[Buffer] = weakref.WeakSet()

    def __contains__(self, buffer: Buffer) -> bool:
        return buffer in self._given

    @property
    def left(self) -> int:
        """The bytes that no buffer holds; they may come late, as where numpy's work still has freed memory."""
        return self.nbytes - sum(granules(one.nbytes) for one in self._alive())

    async def clear(self, stream: Stream) -> None:
        """Wait until all of it is free, and let a stream come behind all that was done with it.

        Raises:
            DeviceError: The device would not order the stream.
        """
        region = self._region
        if region is None:
            return
        whole = region.try_allocate(self.nbytes, stream=stream)
        if whole is None:
            if region.room() == self.nbytes:
                # All of it is free. A request would wait until the device does as it is told; the device says why not.
                stream.wait(stream.record())
            whole = await region.allocate_async(self.nbytes, stream=stream)
        self._start = whole.address
        whole.free()

    async def allocate(self, nbytes: int, stream: Stream, tag: str | None = None) -> Buffer:
        """Wait for memory at home on a stream."""
        buffer = await self._share.allocate_async(nbytes, stream=stream, tag=tag)
        self._given.add(buffer)
        self.peak = max(self.peak, self.nbytes - self.left)
        return buffer

    def has_no_gap_of(self, nbytes: int) -> bool:
        """Whether what is held leaves no piece of that length, and none is coming."""
        if self._region is None or self._region.room() < self.left:
            return False
        end, longest = self._start, 0
        for buffer in sorted(self._alive(), key=lambda one: one.address):
            longest = max(longest, buffer.address - end)
            end = buffer.address + granules(buffer.nbytes)
        return max(longest, self._start + self.nbytes - end) < granules(nbytes)

    def close(self) -> None:
        """Give the range back; what is still held of it goes on as memory of the lease."""
        if self._region is not None:
            self._region.close()

    def _alive(self) -> list[Buffer]:
        return [one for one in self._given if one.alive and one.nbytes]


class StepMemory:
    """What one step allocates from: a slot for each size that its stage has stated, and no more than that."""

    def __init__(self, stage: str, slots: Mapping[Use, Slot], *, results: bool) -> None:
        """Take the slots; `results` says that what the step returns stays until all is done."""
        self._stage = stage
        self._slots = slots
        self._results = results
        self._cleared: set[Use] = set()
        self._clearing = anyio.Lock()

    async def take(self, nbytes: int, use: Use, stream: Stream, tag: str | None) -> Buffer:
        """Wait for memory at home on a stream.

        Raises:
            InvalidRequest: It is more than the stage has left of what it stated, or what is left is in pieces.
        """
        if use not in get_args(Use):
            raise InvalidRequest("use", use, '"saved", "output" or "working"')
        slot = self._slots[use]
        if use not in self._cleared:
            async with self._clearing:  # a step may have tasks of its own
                if use not in self._cleared:
                    await slot.clear(stream)
                    self._cleared.add(use)
        if granules(nbytes) > slot.left:
            most = (
                f"at most the {format_size(slot.left)} that {quoted(self._stage)} has left of what it states as {use}"
            )
            raise InvalidRequest("size", Described(format_size(nbytes)), most, hint=f"state more as {use}")
        if nbytes and slot.has_no_gap_of(nbytes):
            pieces = f"less, as the {format_size(slot.left)} of {use} that {quoted(self._stage)} has left are in pieces"
            raise InvalidRequest(
                "size", Described(format_size(nbytes)), pieces, hint="free first what was allocated last"
            )
        return await slot.allocate(nbytes, stream, tag)

    def check_saved(self, values: object) -> None:
        """Raise where values have memory that the next steps use."""
        self._check("save()", values, "saved", but=("working",) if self._results else ("working", "output"))

    def check_output(self, output: object, given: object) -> None:
        """Raise if an output has memory that the next steps use; a result must not use memory of the inputs either."""
        self._check("output", output, "output", but=("working", "saved") if self._results else ("working",))
        if self._results and buffers_except(output, but=()) != buffers_except(output, but=given):
            got = Described(f"what {quoted(self._stage)} was given")
            raise InvalidRequest("output", got, "memory allocated as output, as it is a result")

    def _check(self, what: str, values: object, use: Use, *, but: Sequence[Use]) -> None:
        for buffer in buffers_in(values):
            found = next((other for other in but if buffer in self._slots[other]), None)
            if found is not None:
                got = Described(f"{format_size(buffer.nbytes)} that {quoted(self._stage)} allocated as {found}")
                raise InvalidRequest(what, got, f"memory allocated as {use}", hint=f'allocate(size, use="{use}")')


def granules(nbytes: int) -> int:
    """Return the bytes that a buffer of so many is counted as."""
    return -(-nbytes // GRANULE) * GRANULE


class StageMemory:
    """All that a stage needs, side by side in one lease.

    A schedule takes micro-batches back in the order in which it took them forward. So what is kept for them takes turns
    in as many slots as there are at once: each has been left when it is needed again.

    Attributes:
        all: Every slot.
    """

    def __init__(self, lease: Lease, needs: StageNeeds) -> None:
        self._name = needs.name
        self.all: list[Slot] = []

        def slots(part: Need) -> list[Slot]:
            made = [Slot(lease, part.nbytes, f"{needs.name}: {part.what}") for _ in range(part.count)]
            self.all += made
            return made

        self._nothing = Slot(lease, 0, "")
        self._saved = slots(needs.saved)
        self._working = slots(needs.working)
        self._outputs = slots(needs.outputs)
        self._results = slots(needs.results)
        self._inputs = slots(needs.inputs)
        self._gradients = slots(needs.gradients)

    def of(self, step: Step, number: int) -> StepMemory:
        """Return what a step may allocate from, which is the stage's so many-th, counted from 0."""
        results = bool(self._results) and step.forward
        saved = _turn(self._saved, step.micro_batch) if step.forward else self._nothing
        # The step before has the other slot, from which its output may still be copied.
        output = self._results[step.micro_batch] if results else _turn(self._outputs, number)
        return StepMemory(self._name, {"saved": saved, "output": output, "working": self._working[0]}, results=results)

    def arrival(self, step: Step) -> Slot:
        """Return where an item lies that comes with a step."""
        return _turn(self._inputs if step.forward else self._gradients, step.micro_batch)


def _turn(slots: list[Slot], number: int) -> Slot:
    return slots[number % len(slots)]
