"""A stage at its place: its streams, its budgets, what it keeps, and how far it has come."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from asyncmem.errors import Described, InvalidRequest
from asyncmem.figures import format_size
from asyncmem.pipeline.parallel.items import buffers, copied, free
from asyncmem.pipeline.parallel.memory import StepMemory, granules
from asyncmem.pipeline.parcels import buffers_in
from asyncmem.pool import Budget

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from asyncmem.core import Buffer
    from asyncmem.devices import Device, Fence, Stream
    from asyncmem.pipeline.parallel.needs import Needs
    from asyncmem.pipeline.parallel.schedule import Step
    from asyncmem.pipeline.parallel.stage import ParallelStage
    from asyncmem.pool.share import Share


@dataclass(frozen=True, slots=True)
class Way:
    """The streams of one direction: of what a stage sends on there, and of what comes to it.

    The two directions have streams of their own, because which of two neighbours is sooner nobody knows beforehand.

    Attributes:
        out: Where copies to the neighbour run, beside the stage's own work.
        landing: The home of what comes, until it is used. Nothing runs there: it says from when memory may be written.
    """

    out: Stream
    landing: Stream


@dataclass(frozen=True, slots=True)
class Streams:
    """The streams of one stage.

    Attributes:
        compute: Where its steps queue their work.
        forward: Those of outputs to the next stage, and of inputs.
        backward: Those of gradients, to the stage before and from the one behind.
    """

    compute: Stream
    forward: Way
    backward: Way

    @classmethod
    def of(cls, device: Device, name: str) -> Streams:
        """Make them on a device."""

        def way(out: str, landing: str) -> Way:
            return Way(device.create_stream(f"{name} {out}"), device.create_stream(f"{name} {landing}"))

        compute = device.create_stream(f"{name} steps")
        return cls(compute, way("outputs out", "inputs"), way("gradients out", "gradients"))

    def way(self, step: Step) -> Way:
        """Answer those of a step's direction."""
        return self.forward if step.forward else self.backward


class Moment:
    """When a fence was reached, on the clock of its device; noted as it is reached."""

    __slots__ = ("_device", "_fence", "at")

    def __init__(self, fence: Fence, device: Device) -> None:
        self.at: float | None = None
        self._device = device
        self._fence = fence
        fence.notify(self._note)

    async def wait(self) -> None:
        """Wait until it is reached.

        Raises:
            DeviceError: The device is lost.
        """
        await self._fence
        self._note()  # where nobody has called yet

    def _note(self) -> None:
        if self.at is None:
            self.at = self._device.now


@dataclass(slots=True)
class Taken:
    """A step that has been queued.

    Attributes:
        step: Which.
        called: When its function was called.
        source: When the step that it takes over from is over; None where it takes nothing.
        arrived: When what it takes is there.
        ended: When its own work is over.
        sent: When what it answers is there where it goes; None where that is nowhere.
        nbytes: How many bytes it sends.
        work: What it queued on a stream of the host; each has an error of its own.
    """

    step: Step
    called: float
    source: Moment | None
    arrived: Moment | None
    ended: Moment
    sent: Moment | None = None
    nbytes: int = 0
    work: list[Awaitable[object]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Parcel:
    """An item on its way to the stage that has the memory for it already."""

    item: object
    source: Moment
    fence: Fence
    arrived: Moment


class Seat:
    """A stage for one run.

    Attributes:
        device: Where it works.
        budget: All that it may hold: what its steps allocate from `memory`, and what comes from its neighbours.
        kept: What forwards have saved, by micro-batch.
        taken: The steps that have been queued.
        followed: How many of them the device is known to be done with.
    """

    def __init__(self, stage: ParallelStage, needs: Needs, streams: Streams, pool: Share) -> None:
        self.stage = stage
        self.needs = needs
        self.streams = streams
        self.device = pool.flow.pool.device
        self.budget = Budget(pool, needs.name, max(needs.total, 1))
        self.memory = StepMemory(self.budget, needs.name, max(needs.own, 1))
        self._inputs = Budget(self.budget, f"{needs.name}: inputs", max(needs.inputs.total, 1))
        self._gradients = Budget(self.budget, f"{needs.name}: gradients", max(needs.gradients.total, 1))
        self.kept: dict[int, tuple[object, ...]] = {}
        self._leaving: list[Buffer] = []
        self.taken: list[Taken] = []
        self.followed = 0

    @property
    def name(self) -> str:
        """What errors and reports call the stage."""
        return self.needs.name

    async def send(self, item: object, step: Step, ended: Fence, to: Seat) -> Parcel:
        """Start copying what a step answered to a neighbour's memory, which is waited for if need be."""
        out, landing = self.streams.way(step).out, to.streams.way(step).landing
        out.wait(ended)
        budget = to._inputs if step.forward else to._gradients
        _need_no_more(item, (self if step.forward else to).stage.output)

        def allocate(nbytes: int) -> Awaitable[Buffer]:
            return budget.allocate_async(nbytes, stream=landing)

        landed = await copied(item, allocate, out)
        fence = out.record()
        return Parcel(landed, Moment(ended, self.device), fence, Moment(fence, self.device))

    def leave(self, used: object, answer: object, *, but: object) -> None:
        """Free what a step has used, and the answer before its own, except for what is in `but`.

        An answer stays for a step: the next one could get its memory only behind the copy of it.
        """
        before, self._leaving = self._leaving, buffers(answer, but=but)
        free(buffers(used, but=(but, self._leaving)))
        free(before)

    def free_all(self) -> None:
        """Free what it keeps."""
        self.leave(list(self.kept.values()), (), but=())
        self.kept.clear()

    def peak(self) -> int:
        """Answer the most bytes that it held at once."""
        return self.budget.stats().peak_allocated


def _need_no_more(item: object, stated: int) -> None:
    total = sum(granules(buffer.nbytes) for buffer in buffers_in(item))
    if total > stated:
        said = f"at most the {format_size(stated)} that were stated as output"
        raise InvalidRequest("answer", Described(format_size(total)), said)
