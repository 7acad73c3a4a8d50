"""A stage at its place: its streams, its memory, what it keeps, and how far it has come."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from asyncmem.errors import Described, DeviceError, InvalidRequest
from asyncmem.figures import format_size
from asyncmem.pipeline.parallel.items import buffers, copied, free
from asyncmem.pipeline.parallel.memory import granules
from asyncmem.pipeline.parallel.places import Places
from asyncmem.pipeline.parcels import buffers_in

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from asyncmem.devices import Device, Fence, Stream
    from asyncmem.pipeline.parallel.memory import StepMemory
    from asyncmem.pipeline.parallel.needs import Needs
    from asyncmem.pipeline.parallel.schedule import Step
    from asyncmem.pipeline.parallel.stage import ParallelStage
    from asyncmem.pipeline.streams import Lent
    from asyncmem.pool import Lease


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
    def of(cls, lent: Lent, name: str) -> Streams:
        """Make them for a stage."""

        def way(out: str, landing: str) -> Way:
            return Way(lent.stream(f"{name} {out}"), lent.stream(f"{name} {landing}"))

        compute = lent.stream(f"{name} steps")
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
        kept: What forwards have saved, by micro-batch.
        taken: The steps that have been queued.
        followed: How many of them the device is known to be done with.
    """

    def __init__(self, stage: ParallelStage, needs: Needs, streams: Streams, ground: Lease) -> None:
        self.stage = stage
        self.needs = needs
        self.streams = streams
        self.device = ground._opened.device
        self._ground = ground
        self._places = Places(ground, needs)
        self.kept: dict[int, tuple[object, ...]] = {}
        self.taken: list[Taken] = []
        self.followed = 0

    @property
    def name(self) -> str:
        """What errors and reports call the stage."""
        return self.needs.name

    def memory(self, step: Step) -> StepMemory:
        """Answer what the step that is queued next may allocate from."""
        return self._places.of(step, len(self.taken))

    async def send(self, item: object, step: Step, ended: Fence, to: Seat) -> Parcel:
        """Start copying what a step answered to a neighbour's memory, which is waited for if need be."""
        out, landing = self.streams.way(step).out, to.streams.way(step).landing
        out.wait(ended)
        _need_no_more(item, (self if step.forward else to).stage.output)
        place = to._places.landing(step)
        await place.clear(landing)
        landed = await copied(item, partial(place.allocate, stream=landing), out)
        fence = out.record()
        return Parcel(landed, Moment(ended, self.device), fence, Moment(fence, self.device))

    def leave(self, used: object, *, but: object) -> None:
        """Free what a step has used or answered, except for what is in `but`.

        Fences say here and now what that is behind: those of the pool may come later, and would be behind later steps.
        """
        free(buffers(used, but=but))
        opened = self._ground._opened
        for stream in (self.streams.compute, self.streams.forward.out, self.streams.backward.out):
            with suppress(DeviceError):  # whoever works there is told
                opened.retire.fence(opened.core.register_stream(stream))

    def free_all(self) -> None:
        """Free what it keeps."""
        self.leave(list(self.kept.values()), but=())
        self.kept.clear()

    def peak(self) -> int:
        """Answer the most bytes that its places held, in sum."""
        return sum(place.peak for place in self._places.all)

    def close(self) -> None:
        """Give its memory back; results go on as memory of the pool."""
        for place in self._places.all:
            place.close()
        self._ground.__exit__(None, None, None)


def _need_no_more(item: object, stated: int) -> None:
    total = sum(granules(buffer.nbytes) for buffer in buffers_in(item))
    if total > stated:
        said = f"at most the {format_size(stated)} that were stated as output"
        raise InvalidRequest("answer", Described(format_size(total)), said)
