"""`PipelineParallel`: a model cut into stages, through which micro-batches go forward and backward.

In a run, each stage's task queues its steps in the schedule's order, and follows the device at a distance. A task waits
for another task only until that has queued its step; that one stage's work comes behind another's is said to the
streams. So the tasks are ahead of the devices, and nothing but the schedule holds these up. Memory is freed as soon as
its last use has been queued: its next user comes behind that, in stream order.
"""

import math
from collections import defaultdict
from collections.abc import Awaitable, Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import InitVar, dataclass, field
from functools import partial
from typing import Any, Literal, NamedTuple

import anyio

from asyncmem.core import GRANULE
from asyncmem.devices import Device, Fence, Stream
from asyncmem.errors import Described, DeviceError, InvalidRequest, StepError
from asyncmem.figures import format_size
from asyncmem.pipeline.parallel.schedule import SCHEDULES, Schedule, Step, measure
from asyncmem.pipeline.parallel.stage import ParallelStage, Slot, StageNeeds, StepContext, Use, needs_of
from asyncmem.pipeline.report import ParallelReport
from asyncmem.pipeline.resources import BorrowedStreams
from asyncmem.pipeline.stage import granules
from asyncmem.pipeline.tasks import clear_frames, describe_error, is_own_error, within
from asyncmem.pipeline.trees import buffers_except, buffers_in, copy_buffers, free_buffers, set_home
from asyncmem.pool import AsyncMemoryPool, Lease
from asyncmem.pool.pool import pool_of
from asyncmem.pool.share import Share, record_fence, reserve_ranges
from asyncmem.text import printable
from asyncmem.units import parse_count, parse_duration


class PipelineParallel:
    """Takes micro-batches through the stages of a model: ``results = await parallel.run(micro_batches)``.

    Each stage has a stream for its work and one for copies to its neighbours, on the device of its pool. What is behind
    what is said to the streams, so the event loop waits for a device only to be no more than `ahead` steps before it.
    How much memory a stage may have follows from the schedule and from what the stage states; it has that and no more.

    Args:
        stages: The stages in order.
        pools: One pool for all, or one for each stage. Pools of different devices must let each other's streams in
            (option `peers`). A run begins once as much as it needs is free, in one piece for each stage.
        schedule: "1f1b", or "gpipe" which keeps all micro-batches.
        timeout: The most seconds that a step may take, to be queued and again to be done; None for no bound.
        ahead: How many steps a stage may have queued that its device has not done; None for no bound.

    Raises:
        InvalidRequest: There is no stage, or an argument cannot be right.
    """

    def __init__(
        self,
        stages: Sequence[ParallelStage],
        pools: Share | Sequence[Share],
        *,
        schedule: Literal["1f1b", "gpipe"] = "1f1b",
        timeout: float | str | None = None,
        ahead: int | None = 4,
    ) -> None:
        if not stages or not all(isinstance(stage, ParallelStage) for stage in stages):
            raise InvalidRequest("stages", stages, "at least one ParallelStage")
        if schedule not in SCHEDULES:
            raise InvalidRequest("schedule", schedule, f"one of {sorted(SCHEDULES)}")
        self._stages = list(stages)
        self._names = [stage.name or f"stage {at}" for at, stage in enumerate(stages)]
        self._pools: list[Share] = list(pools) if isinstance(pools, list | tuple) else [pools] * len(stages)  # type: ignore[list-item]  # a share is no sequence
        for pool in self._pools:
            if not isinstance(pool, Share):
                raise InvalidRequest("pools", pool, "a pool or a budget, or one for each stage")
        if len(self._pools) != len(stages):
            raise InvalidRequest("pools", len(self._pools), f"one, or one for each of {len(stages)} stages")
        self._by_pool = {pool: [at for at, its in enumerate(self._pools) if its is pool] for pool in self._pools}
        self._schedule = SCHEDULES[schedule]
        self._schedule_name = schedule
        self._timeout = None if timeout is None else parse_duration(timeout)
        self._ahead = None if ahead is None else parse_count(ahead, what="ahead", least=1)
        self._streams: list[Streams] = []
        self._running = False
        self._report: ParallelReport | None = None

    def __repr__(self) -> str:
        return f"<asyncmem.PipelineParallel {self._schedule_name}: {' -> '.join(map(printable, self._names))}>"

    async def run(self, micro_batches: Iterable[object]) -> list[Any]:
        """Take all micro-batches forward and backward, and return the outputs of the last stage's forwards, in order.

        Buffers among the micro-batches are of the first stage's device and stay the caller's; they are in order there.

        Raises:
            InvalidRequest: A pool has too little memory for what the schedule keeps; the text has the sum. Or it runs.
            StepError: A step raised or took too long, or its device failed. It says which; all memory is free then.

        Cancelled: all steps are, and all memory is free.
        """
        items = list(micro_batches)
        if self._running:
            raise InvalidRequest("run()", self, "one run at a time")
        if not items:
            return []
        self._running = True
        try:
            schedule = self._schedule(len(self._stages), len(items))
            with ExitStack() as memory:
                stage_runs = await self._begin(schedule, memory)
                results = await Run(schedule, stage_runs, items, self._timeout, self._ahead).main()
                self._report = measure(schedule, stage_runs)
                return results
        finally:
            self._running = False

    def needs(self, micro_batches: int) -> tuple[int, ...]:
        """Return how many bytes each stage would need for so many micro-batches."""
        schedule = self._schedule(len(self._stages), micro_batches)
        return tuple(one.total for one in needs_of(self._stages, self._names, schedule))

    def report(self) -> ParallelReport:
        """Return the figures of the last run that came to its end."""
        if self._report is None:
            raise InvalidRequest("report()", self, "a run that came to its end")
        return self._report

    async def _begin(self, schedule: Schedule, until: ExitStack) -> "list[StageRun]":
        """See that there is room in all pools, and wait for all stages' memory, one pool after the other.

        All runs have one order, so none holds up another.
        """
        needs = needs_of(self._stages, self._names, schedule)
        for pool, its in self._by_pool.items():
            if isinstance(pool, AsyncMemoryPool):
                await pool.open()
            total, capacity = sum(needs[at].total for at in its), pool.capacity()
            if total > capacity:
                least = f"at least {format_size(total)}: {'; '.join(str(needs[at]) for at in its)}"
                raise InvalidRequest("limit", Described(format_size(capacity)), least)
        if not self._streams:
            self._streams = [Streams(pool, name) for pool, name in zip(self._pools, self._names, strict=True)]
        leases: dict[int, Lease] = {}
        for pool in sorted(self._by_pool, key=id):
            its = self._by_pool[pool]
            sizes = [max(needs[at].total, GRANULE) for at in its]
            leases |= zip(its, await reserve_ranges(pool, sizes, "pipeline parallel", until), strict=True)
        return [
            StageRun(stage, needs[at], self._streams[at], leases[at], until) for at, stage in enumerate(self._stages)
        ]


@dataclass(eq=False)
class Run:
    """Takes micro-batches through the stages. Nothing of it outlives `main`."""

    schedule: Schedule
    stage_runs: "Sequence[StageRun]"
    micro_batches: Sequence[object]
    timeout: float | None
    ahead: int | None

    def __post_init__(self) -> None:
        # What has been sent to a step of a stage that has not taken it yet.
        self._messages: dict[tuple[int, Step], tuple[object, Transfer]] = {}
        self._came: defaultdict[tuple[int, Step], anyio.Event] = defaultdict(anyio.Event)
        self._scope: anyio.CancelScope | None = None
        self._error: StepError | None = None
        self._results: list[object] = [None] * len(self.micro_batches)

    async def main(self) -> list[object]:
        """Run all stages until everything is done, and return the outputs of the last stage's forwards.

        Raises:
            StepError: A step failed. Everything is free then.
        """
        done = False
        try:
            async with anyio.create_task_group() as tasks:
                self._scope = tasks.cancel_scope
                for at, stage_run in enumerate(self.stage_runs):
                    tasks.start_soon(self._take_steps, at, stage_run, name=stage_run.name)
            if self._error is not None:
                raise self._error
            done = True
        finally:
            self._free_what_is_left(results=not done)
        return self._results

    # -- a stage's task ------------------------------------------------------------------------------------------------

    async def _take_steps(self, at: int, stage_run: "StageRun") -> None:
        for number, step in enumerate(self.schedule.steps[at]):
            if self.ahead is not None and not await self._follow(stage_run, number + 1 - self.ahead):
                return
            try:
                await self._take_step(at, stage_run, step)
            except BaseException as error:
                clear_frames(error)
                if not is_own_error(error):
                    raise
                self._fail(stage_run, step, error)
                return
        await self._follow(stage_run, len(stage_run.queued))

    async def _take_step(self, at: int, stage_run: "StageRun", step: Step) -> None:
        last = len(self.stage_runs) - 1
        stage, compute, number = stage_run.stage, stage_run.streams.compute, step.micro_batch
        received: object = None
        transfer: Transfer | None = None
        if at != (0 if step.forward else last):
            await self._came[at, step].wait()
            received, transfer = self._messages.pop((at, step))
        fed = self.micro_batches[number] if step.forward and at == 0 else None  # it stays the caller's
        saved = () if step.forward else stage_run.kept.pop(number)
        context = stage_run.context(step)
        output: object = None
        try:
            if transfer is not None:
                compute.wait(transfer.arrived.fence)
                set_home(received, compute)
            began = stage_run.device.now
            for buffer in buffers_in(fed):
                buffer.use_on(compute)
            if step.forward:
                work = stage.forward(fed if at == 0 else received, context)
            else:
                work = stage.backward(received, saved, context)
            output = await within(self.timeout, work)
            context._check_output(output, received)
            queued = QueuedStep(step, began, transfer, Timestamp(compute.record(), stage_run.device), context.work)
            stage_run.queued.append(queued)
            to = at + 1 if step.forward else at - 1
            if to > last:
                self._results[number] = output
            elif to >= 0:
                message = _, queued.sent = await stage_run.send(output, queued, self.stage_runs[to])
                self._messages[to, step] = message
                self._came[to, step].set()
        finally:
            kept: tuple[object, ...] = ()
            if step.forward:
                kept = stage_run.kept[number] = context.saved
            stage_run.leave((received, saved, context.saved, output), but=(kept, self._results[number], fed))

    # -- the device, at a distance -------------------------------------------------------------------------------------

    async def _follow(self, stage_run: "StageRun", upto: int) -> bool:
        """Wait until the device is done with so many steps; False where one of them failed."""
        while stage_run.followed < upto:
            queued = stage_run.queued[stage_run.followed]
            try:
                if queued.taken is not None:
                    await queued.taken.arrived.wait()  # its sender is held to the limit
                await within(self.timeout, queued.over())
            except BaseException as error:
                if not is_own_error(error):
                    raise
                self._fail(stage_run, queued.step, error)
                return False
            stage_run.followed += 1
        return True

    # -- ends ----------------------------------------------------------------------------------------------------------

    def _fail(self, stage_run: "StageRun", step: Step, error: BaseException) -> None:
        clear_frames(error)
        if self._error is None:
            reason = describe_error(error)
            self._error = StepError(stage_run.name, step.micro_batch, forward=step.forward, reason=reason)
            self._error.__cause__ = error
            assert self._scope is not None
            self._scope.cancel()

    def _free_what_is_left(self, *, results: bool) -> None:
        free_buffers(list(self._messages.values()))
        for stage_run in self.stage_runs:
            stage_run.leave(list(stage_run.kept.values()), but=())
            stage_run.kept.clear()
        if results:
            free_buffers(self._results)


class Streams:
    """The streams of one stage.

    The two directions have streams of their own, because it is not known which of two neighbours is sooner.

    Attributes:
        compute: Where its steps queue their work.
        out: Where copies to the neighbour run, beside the stage's own work; by whether they go forward.
        arrival: The home of what comes, until it is used; by whether that goes forward. Nothing runs there: it says
            from when memory may be written.
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
    """The way of an item to the stage that has the memory for it already.

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
        taken: How what it takes has come; None where it takes nothing.
        ended: When its own work is over.
        work: What it queued on a stream of the host; each has an error of its own.
        sent: How what it returns goes where it belongs; None where that is nowhere.
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
    in as many slots as there are at once: each has been left when it is needed again.

    Attributes:
        until: Ends what it makes.
        device: Where it works.
        kept: What forwards have saved, by micro-batch.
        queued: The steps that have been queued.
        followed: How many of them the device is known to be done with.
    """

    stage: ParallelStage
    needs: StageNeeds
    streams: Streams
    lease: Lease
    until: InitVar[ExitStack]

    def __post_init__(self, until: ExitStack) -> None:
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
            "saved": self._turn("saved", step.micro_batch) if step.forward else self._nothing,
            # The step before has the other slot, from which its output may still be copied.
            "output": self._turn("outputs", len(self.queued)),
            "working": self._turn("working", 0),
        }
        is_result = step.forward and bool(self._slots["results"])
        if is_result:
            slots["output"] = self._turn("results", step.micro_batch)
        return StepContext(self.name, step, self.streams.compute, slots, is_result=is_result)

    async def send(self, item: object, queued: QueuedStep, to: "StageRun") -> tuple[object, Transfer]:
        """Start copying a step's output to a neighbour's memory; wait for that memory if necessary."""
        step = queued.step
        out, arrival = self.streams.out[step.forward], to.streams.arrival[step.forward]
        out.wait(queued.ended.fence)
        _check_output(item, (self if step.forward else to).stage.output)
        slot = to._turn("inputs" if step.forward else "gradients", step.micro_batch)
        await slot.clear(arrival)
        landed = await copy_buffers(item, partial(slot.allocate, stream=arrival), out)
        return landed, Transfer(queued.ended, Timestamp(out.record(), self.device))

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

    def _turn(self, what: str, number: int) -> Slot:
        slots = self._slots[what]
        return slots[number % len(slots)]


def _check_output(item: object, stated: int) -> None:
    total = sum(granules(buffer.nbytes) for buffer in buffers_in(item))
    if total > stated:
        said = f"at most the {format_size(stated)} that were stated as output"
        raise InvalidRequest("output", Described(format_size(total)), said)
