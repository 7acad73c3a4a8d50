"""A stage in a run: its streams, its memory, the steps that it has queued, and how their outputs come and go."""

import math
from collections.abc import Awaitable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import InitVar, dataclass, field
from functools import partial
from typing import NamedTuple

from asyncmem.devices import Device, Fence, Stream
from asyncmem.errors import Described, DeviceError, InvalidRequest
from asyncmem.figures import format_size
from asyncmem.pipeline.parallel.link import LinkRun, Sending
from asyncmem.pipeline.parallel.schedule import Step
from asyncmem.pipeline.parallel.stage import ParallelStage, Slot, StageNeeds, StepContext, Use
from asyncmem.pipeline.resources import BorrowedStreams
from asyncmem.pipeline.stage import granules
from asyncmem.pipeline.trees import buffers_except, buffers_in, copy_buffers, free_buffers
from asyncmem.pool import Lease
from asyncmem.pool.pool import pool_of
from asyncmem.pool.share import Share, record_fence


class Streams:
    """The streams of one stage.

    The two directions have streams of their own, because it is not known which of two neighbours is sooner.

    Attributes:
        compute: Where its steps queue their work.
        out: Where copies to the neighbour run, beside the stage's own work; by whether they go forward.
        arrival: The home of items that arrive, until they are used; by whether they go forward. Nothing runs there: it
            orders when memory may be written.
    """

    def __init__(self, pool: Share, name: str) -> None:
        self._borrowed = BorrowedStreams(pool_of(pool))
        self.compute, outputs, inputs, gradients_out, gradients = (
            self._borrowed.stream(f"{name} {what}")
            for what in ("steps", "outputs out", "inputs", "gradients out", "gradients")
        )
        self.out = {True: outputs, False: gradients_out}
        self.arrival = {True: inputs, False: gradients}


class Timestamp:
    """When a fence was reached, on the clock of its device; noted as it is reached, and infinite before."""

    __slots__ = ("_device", "at", "fence")

    def __init__(self, fence: Fence, device: Device) -> None:
        self.at = math.inf
        self.fence = fence
        self._device = device
        fence.notify(self._note)

    async def wait(self) -> None:
        """Wait until it is reached.

        Raises:
            DeviceError: The device is lost.
        """
        await self.fence
        self._note()  # nothing has called it yet

    def _note(self) -> None:
        self.at = min(self.at, self._device.now)


class Transfer(NamedTuple):
    """The transfer of an item to the stage that has the memory for it already.

    Attributes:
        source: When the step that it comes from is over.
        arrived: When it is there.
    """

    source: Timestamp
    arrived: Timestamp


@dataclass(slots=True)
class QueuedStep:
    """A step that has been queued.

    Attributes:
        step: Which.
        called: When its function was called.
        taken: The transfer of its input; None without one.
        ended: When its own work is over.
        work: What it queued on a stream of the host; each has an error of its own.
        sent: The transfer of its output; None without one.
    """

    step: Step
    called: float
    taken: Transfer | None
    ended: Timestamp
    work: list[Awaitable[object]] = field(default_factory=list)
    sent: Transfer | None = None

    async def over(self) -> None:
        """Wait until the device is done with it."""
        await self.ended.wait()
        for work in self.work:
            await work
        self.work.clear()
        if self.sent is not None:
            await self.sent.arrived.wait()


@dataclass(eq=False)
class StageRun:
    """A stage for one run, with all the memory that it needs in one lease.

    A schedule takes micro-batches back in the order in which it took them forward. So what is kept for them takes turns
    in as many slots as there are at once: each is free when it is needed again.

    Attributes:
        at: Which of all stages it is.
        stages: All stages.
        until: Ends what it makes.
        device: Where it works.
        kept: What forwards have saved, by micro-batch.
        queued: The steps that have been queued.
        followed: How many of them the device is known to be done with.
    """

    at: int
    stages: Sequence[ParallelStage]
    needs: StageNeeds
    streams: Streams
    lease: Lease
    until: InitVar[ExitStack]

    def __post_init__(self, until: ExitStack) -> None:
        self.stage = self.stages[self.at]
        self.device = pool_of(self.lease).device
        self._nothing = Slot(self.lease, 0, "", until)
        self._slots = {
            part.what: [Slot(self.lease, part.nbytes, f"{self.name}: {part.what}", until) for _ in range(part.count)]
            for part in self.needs.parts
        }
        self.kept: dict[int, tuple[object, ...]] = {}
        self.queued: list[QueuedStep] = []
        self.followed = 0

    @property
    def name(self) -> str:
        """What errors and reports call the stage."""
        return self.needs.name

    def context(self, step: Step) -> StepContext[Stream]:
        """Return what the step that is queued next works with."""
        slots: dict[Use, Slot] = {
            "saved": self._slot("saved", step.micro_batch) if step.forward else self._nothing,
            # The step before has the other slot, from which its output may still be copied.
            "output": self._slot("outputs", len(self.queued)),
            "working": self._slot("working", 0),
        }
        is_result = step.forward and bool(self._slots["results"])
        if is_result:
            slots["output"] = self._slot("results", step.micro_batch)
        return StepContext(self.name, step, self.streams.compute, slots, is_result=is_result)

    async def send(self, item: object, queued: QueuedStep, to: "StageRun") -> tuple[object, Transfer]:
        """Start copying a step's output to a neighbour's memory; wait for that memory if necessary."""
        step, out = queued.step, self._sender(item, queued)
        arrival = to.streams.arrival[step.forward]
        slot = await to._clear_slot(step)
        landed = await copy_buffers(item, partial(slot.allocate, stream=arrival), out)
        return landed, Transfer(queued.ended, Timestamp(out.record(), self.device))

    async def send_away(self, item: object, queued: QueuedStep, link: LinkRun) -> Transfer:
        """Start sending a step's output to a neighbour in another process."""
        out = self._sender(item, queued)
        await link.send(Sending(item, queued.step, queued.ended.fence, out, pool_of(self.lease)))
        return Transfer(queued.ended, Timestamp(out.record(), self.device))

    async def receive(self, step: Step, link: LinkRun) -> tuple[object, Transfer]:
        """Wait for what a step takes from another process."""
        slot, arrival = await self._clear_slot(step), self.streams.arrival[step.forward]
        landed = await link.receive(step, partial(slot.allocate, stream=arrival), arrival)
        arrived = Timestamp(arrival.record(), self.device)
        return landed, Transfer(arrived, arrived)

    def _sender(self, item: object, queued: QueuedStep) -> Stream:
        """Return the stream by which a step's output goes, behind the step."""
        forward = queued.step.forward
        _check_output(item, self.stages[self.at if forward else self.at - 1].output)
        out = self.streams.out[forward]
        out.wait(queued.ended.fence)
        return out

    async def _clear_slot(self, step: Step) -> Slot:
        slot = self._slot("inputs" if step.forward else "gradients", step.micro_batch)
        await slot.clear(self.streams.arrival[step.forward])
        return slot

    def leave(self, used: object, *, but: object) -> None:
        """Free what a step has used or returned, except for what is in `but`.

        Fences say here and now what that is behind: those of the pool may come later, and would be behind later steps.
        """
        free_buffers(buffers_except(used, but=but))
        for stream in (self.streams.compute, *self.streams.out.values()):
            with suppress(DeviceError):  # raised where that stream is used next
                record_fence(self.lease, stream)

    def peak(self) -> int:
        """Return the most bytes that its slots held, in sum."""
        return sum(slot.peak for slots in self._slots.values() for slot in slots)

    def _slot(self, what: str, number: int) -> Slot:
        slots = self._slots[what]
        return slots[number % len(slots)]


def _check_output(item: object, stated: int) -> None:
    total = sum(granules(buffer.nbytes) for buffer in buffers_in(item))
    if total > stated:
        said = f"at most the {format_size(stated)} that were stated as output"
        raise InvalidRequest("output", Described(format_size(total)), said)
