"""One run: each stage's task queues its steps in the schedule's order, and follows the device at a distance.

A task waits for another task only until that has queued its step; that one stage's work comes behind another's is said
to the streams. So the tasks are ahead of the devices, and nothing but the schedule holds these up. Memory is freed as
soon as its last use has been queued: its next user comes behind that, in stream order.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import anyio

from asyncmem.errors import Described, DeviceError, InvalidRequest, StepError
from asyncmem.figures import format_duration, format_size
from asyncmem.pipeline.errors import clear_frames, describe_error, is_own_error
from asyncmem.pipeline.parallel.memory import StageMemory, granules
from asyncmem.pipeline.parallel.schedule import Step
from asyncmem.pipeline.parallel.stage import StepContext
from asyncmem.pipeline.resources import pool_of
from asyncmem.pipeline.trees import buffers_except, buffers_in, copy_buffers, free_buffers, set_home

if TYPE_CHECKING:
    from collections.abc import Awaitable, Sequence

    from asyncmem.devices import Device, Fence, Stream
    from asyncmem.pipeline.parallel.memory import StageNeeds, StepMemory
    from asyncmem.pipeline.parallel.schedule import Schedule
    from asyncmem.pipeline.parallel.stage import ParallelStage
    from asyncmem.pipeline.resources import BorrowedStreams
    from asyncmem.pool import Lease


class Mailbox:
    """Where one step of one stage finds what it takes."""

    __slots__ = ("came", "message")

    def __init__(self) -> None:
        self.came = anyio.Event()
        self.message: Message | None = None

    def put(self, message: Message) -> None:
        """Leave it for the waiting step."""
        self.message = message
        self.came.set()

    async def take(self) -> Message:
        """Wait for it. Cancelled: it stays."""
        await self.came.wait()
        message, self.message = self.message, None
        assert message is not None
        return message


class Run:
    """Takes micro-batches through the stages. Nothing of it outlives `main`."""

    def __init__(
        self,
        schedule: Schedule,
        stage_runs: Sequence[StageRun],
        micro_batches: Sequence[object],
        *,
        timeout: float | None,
        ahead: int | None,
    ) -> None:
        self._schedule = schedule
        self._stage_runs = stage_runs
        self._micro_batches = micro_batches
        self._timeout = timeout
        self._ahead = ahead
        self._last = len(stage_runs) - 1
        self._mailboxes = {
            (at, step): Mailbox()
            for at, steps in enumerate(schedule.steps)
            for step in steps
            if at != (0 if step.forward else self._last)
        }
        self._scope: anyio.CancelScope | None = None
        self._error: StepError | None = None
        self._results: list[object] = [None] * schedule.micro_batches
        self._done = False

    async def main(self) -> list[object]:
        """Run all stages until everything is done, and return the outputs of the last stage's forwards.

        Raises:
            StepError: A step failed. Everything is free then.
        """
        try:
            async with anyio.create_task_group() as tasks:
                self._scope = tasks.cancel_scope
                for at, stage_run in enumerate(self._stage_runs):
                    tasks.start_soon(self._take_steps, at, name=stage_run.name)
            if self._error is not None:
                raise self._error
            self._done = True
        finally:
            self._free_what_is_left()
        return self._results

    # -- a stage's task ------------------------------------------------------------------------------------------------

    async def _take_steps(self, at: int) -> None:
        stage_run = self._stage_runs[at]
        for number, step in enumerate(self._schedule.steps[at]):
            if self._ahead is not None and not await self._follow(stage_run, number + 1 - self._ahead):
                return
            try:
                await (self._forward if step.forward else self._backward)(at, stage_run, step)
            except BaseException as error:
                clear_frames(error)
                if not is_own_error(error):
                    raise
                self._fail(stage_run, step, error)
                return
        await self._follow(stage_run, len(stage_run.queued))

    async def _forward(self, at: int, stage_run: StageRun, step: Step) -> None:
        message = await self._mailboxes[at, step].take() if at else None
        item = self._micro_batches[step.micro_batch] if message is None else message.item
        memory = stage_run.memory(step)
        context = StepContext(stage_run.name, step, stage_run.streams.compute, memory)
        received, callers = ((), item) if message is None else (item, ())
        output: object = ()
        try:
            began = self._begin(stage_run, message)
            for buffer in buffers_in(callers):
                buffer.use_on(stage_run.streams.compute)
            output = await self._limited(stage_run.stage.forward(item, context))
            memory.check_output(output, received)
            await self._pass_on(at, stage_run, context, output, message, began)
        finally:
            stage_run.kept[step.micro_batch] = context.saved
            stage_run.leave((received, output), but=(context.saved, self._results[step.micro_batch], callers))

    async def _backward(self, at: int, stage_run: StageRun, step: Step) -> None:
        message = await self._mailboxes[at, step].take() if at < self._last else None
        gradient = None if message is None else message.item
        saved = stage_run.kept.pop(step.micro_batch)
        memory = stage_run.memory(step)
        context = StepContext(stage_run.name, step, stage_run.streams.compute, memory)
        output: object = ()
        try:
            began = self._begin(stage_run, message)
            output = await self._limited(stage_run.stage.backward(gradient, saved, context))
            memory.check_output(output, gradient)
            await self._pass_on(at, stage_run, context, output, message, began)
        finally:
            stage_run.leave((gradient, saved, context.saved, output), but=self._results[step.micro_batch])

    def _begin(self, stage_run: StageRun, message: Message | None) -> float:
        if message is not None:
            stage_run.streams.compute.wait(message.fence)
            set_home(message.item, stage_run.streams.compute)
        return stage_run.device.now

    async def _pass_on(
        self, at: int, stage_run: StageRun, context: StepContext, output: object, message: Message | None, began: float
    ) -> None:
        """Note that a step has been queued, and send its output where it belongs."""
        step, ended = context.step, stage_run.streams.compute.record()
        queued = QueuedStep(
            step,
            called=began,
            source=None if message is None else message.source,
            arrived=None if message is None else message.arrived,
            ended=Timestamp(ended, stage_run.device),
            work=context.work,
        )
        stage_run.queued.append(queued)
        to = at + 1 if step.forward else at - 1
        if to > self._last:
            self._results[step.micro_batch] = output
        elif to >= 0:
            sent = await stage_run.send(output, step, ended, self._stage_runs[to])
            queued.sent = sent.arrived
            self._mailboxes[to, step].put(sent)

    # -- the device, at a distance -------------------------------------------------------------------------------------

    async def _follow(self, stage_run: StageRun, upto: int) -> bool:
        """Wait until the device is done with so many steps; False where one of them failed."""
        while stage_run.followed < upto:
            queued = stage_run.queued[stage_run.followed]
            try:
                if queued.arrived is not None:
                    await queued.arrived.wait()  # its sender is held to the limit
                await self._limited(_over(queued))
            except BaseException as error:
                if not is_own_error(error):
                    raise
                self._fail(stage_run, queued.step, error)
                return False
            stage_run.followed += 1
        return True

    async def _limited(self, work: Awaitable[object]) -> object:
        with anyio.move_on_after(self._timeout) as limit:
            return await work
        assert limit.cancelled_caught
        raise TimeoutError(f"it took longer than {format_duration(self._timeout or 0.0)}")

    # -- ends ----------------------------------------------------------------------------------------------------------

    def _fail(self, stage_run: StageRun, step: Step, error: BaseException) -> None:
        clear_frames(error)
        if self._error is None:
            self._error = StepError(
                stage_run.name, step.micro_batch, forward=step.forward, reason=describe_error(error)
            )
            self._error.__cause__ = error
            assert self._scope is not None
            self._scope.cancel()

    def _free_what_is_left(self) -> None:
        for mailbox in self._mailboxes.values():
            if mailbox.message is not None:
                free_buffers(mailbox.message.item)
        for stage_run in self._stage_runs:
            stage_run.free_all()
        if not self._done:
            free_buffers(self._results)


async def _over(queued: QueuedStep) -> None:
    await queued.ended.wait()
    for work in queued.work:
        await work
    queued.work.clear()
    if queued.sent is not None:
        await queued.sent.wait()


@dataclass(frozen=True, slots=True)
class Direction:
    """The streams of one direction: of what a stage sends on there, and of what comes to it.

    The two directions have streams of their own, because it is not known which of two neighbours is sooner.

    Attributes:
        out: Where copies to the neighbour run, beside the stage's own work.
        arrival: The home of what comes, until it is used. Nothing runs there: it says from when memory may be written.
    """

    out: Stream
    arrival: Stream


@dataclass(frozen=True, slots=True)
class Streams:
    """The streams of one stage.

    Attributes:
        compute: Where its steps queue their work.
        forward: Those of outputs to the next stage, and of inputs.
        backward: Those of gradients, to the stage before and from the one behind.
    """

    compute: Stream
    forward: Direction
    backward: Direction

    @classmethod
    def of(cls, streams: BorrowedStreams, name: str) -> Streams:
        """Make them for a stage."""

        def direction(out: str, arrival: str) -> Direction:
            return Direction(streams.stream(f"{name} {out}"), streams.stream(f"{name} {arrival}"))

        compute = streams.stream(f"{name} steps")
        return cls(compute, direction("outputs out", "inputs"), direction("gradients out", "gradients"))

    def direction(self, step: Step) -> Direction:
        """Return those of a step's direction."""
        return self.forward if step.forward else self.backward


class Timestamp:
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
        self._note()  # nothing has called it yet

    def _note(self) -> None:
        if self.at is None:
            self.at = self._device.now


@dataclass(slots=True)
class QueuedStep:
    """A step that has been queued.

    Attributes:
        step: Which.
        called: When its function was called.
        source: When the step that it takes over from is over; None where it takes nothing.
        arrived: When what it takes is there.
        ended: When its own work is over.
        sent: When what it returns is there where it goes; None where that is nowhere.
        work: What it queued on a stream of the host; each has an error of its own.
    """

    step: Step
    called: float
    source: Timestamp | None
    arrived: Timestamp | None
    ended: Timestamp
    sent: Timestamp | None = None
    work: list[Awaitable[object]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Message:
    """An item on its way to the stage that has the memory for it already."""

    item: object
    source: Timestamp
    fence: Fence
    arrived: Timestamp


class StageRun:
    """A stage for one run.

    Attributes:
        device: Where it works.
        kept: What forwards have saved, by micro-batch.
        queued: The steps that have been queued.
        followed: How many of them the device is known to be done with.
    """

    def __init__(self, stage: ParallelStage, needs: StageNeeds, streams: Streams, lease: Lease) -> None:
        self.stage = stage
        self.needs = needs
        self.streams = streams
        self.device = pool_of(lease).device
        self._lease = lease
        self._slots = StageMemory(lease, needs)
        self.kept: dict[int, tuple[object, ...]] = {}
        self.queued: list[QueuedStep] = []
        self.followed = 0

    @property
    def name(self) -> str:
        """What errors and reports call the stage."""
        return self.needs.name

    def memory(self, step: Step) -> StepMemory:
        """Return what the step that is queued next may allocate from."""
        return self._slots.of(step, len(self.queued))

    async def send(self, item: object, step: Step, ended: Fence, to: StageRun) -> Message:
        """Start copying a step's output to a neighbour's memory; wait for that memory if necessary."""
        out, arrival = self.streams.direction(step).out, to.streams.direction(step).arrival
        out.wait(ended)
        _check_output(item, (self if step.forward else to).stage.output)
        slot = to._slots.arrival(step)
        await slot.clear(arrival)
        landed = await copy_buffers(item, partial(slot.allocate, stream=arrival), out)
        fence = out.record()
        return Message(landed, Timestamp(ended, self.device), fence, Timestamp(fence, self.device))

    def leave(self, used: object, *, but: object) -> None:
        """Free what a step has used or returned, except for what is in `but`.

        Fences say here and now what that is behind: those of the pool may come later, and would be behind later steps.
        """
        free_buffers(buffers_except(used, but=but))
        for stream in (self.streams.compute, self.streams.forward.out, self.streams.backward.out):
            with suppress(DeviceError):  # raised where that stream is used next
                self._lease._fence(stream)

    def free_all(self) -> None:
        """Free what it keeps."""
        self.leave(list(self.kept.values()), but=())
        self.kept.clear()

    def peak(self) -> int:
        """Return the most bytes that its slots held, in sum."""
        return sum(slot.peak for slot in self._slots.all)

    def close(self) -> None:
        """Give its memory back; results go on as memory of the pool."""
        for slot in self._slots.all:
            slot.close()
        self._lease.__exit__(None, None, None)


def _check_output(item: object, stated: int) -> None:
    total = sum(granules(buffer.nbytes) for buffer in buffers_in(item))
    if total > stated:
        said = f"at most the {format_size(stated)} that were stated as output"
        raise InvalidRequest("output", Described(format_size(total)), said)
