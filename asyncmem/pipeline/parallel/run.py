"""`PipelineParallel`: a model cut into stages, through which micro-batches go forward and backward.

In a run, each stage's task queues its steps in the schedule's order, and follows the device at a distance. A task waits
for another task only until that has queued its step; the streams order one stage's work behind another's. So the tasks
are ahead of the devices, and nothing but the schedule holds these up. Memory is freed as soon as its last use has been
queued: its next user comes behind that, in stream order.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Literal

import anyio
from anyio.abc import TaskGroup

from asyncmem.core import GRANULE
from asyncmem.errors import Described, InvalidRequest, StepError
from asyncmem.figures import format_size
from asyncmem.pipeline.parallel.link import Link, LinkRun, Plan
from asyncmem.pipeline.parallel.schedule import SCHEDULES, Schedule, StageTally, Step, measure, tally
from asyncmem.pipeline.parallel.stage import ParallelStage, needs_of
from asyncmem.pipeline.parallel.stage_run import QueuedStep, StageRun, Streams, Timestamp, Transfer
from asyncmem.pipeline.report import ParallelReport
from asyncmem.pipeline.tasks import clear_frames, describe_error, is_own_error, within
from asyncmem.pipeline.trees import buffers_in, free_buffers, set_home
from asyncmem.pool import AsyncMemoryPool, Lease
from asyncmem.pool.pool import pool_of
from asyncmem.pool.share import Share, reserve_ranges
from asyncmem.text import printable
from asyncmem.units import parse_count, parse_duration


class PipelineParallel:
    """Takes micro-batches through the stages of a model: ``results = await parallel.run(micro_batches)``.

    Each stage has a stream for its work and one for copies to its neighbours, on the device of its pool. The streams
    order the work, so the event loop waits for a device only to be no more than `ahead` steps before it. How much
    memory a stage may have follows from the schedule and from what the stage states; it has that and no more.

    Args:
        stages: The stages in order.
        pools: One pool for all, or one for each stage. Pools of different devices must let each other's streams in
            (option `peers`). A run begins once as much as it needs is free, in one piece for each stage. None for
            stages that other processes have.
        schedule: "1f1b"; "eager", which keeps more micro-batches so that no stage waits for what is on its way; or
            "gpipe", which keeps all.
        timeout: The most seconds that a step may take, to be queued and again to be done; None for no bound.
        ahead: How many steps a stage may have queued that its device has not done; None for no bound.
        link: The way to the processes that have the other stages, an `asyncmem.ranks.Ranks`.

    Raises:
        InvalidRequest: There is no stage, or an argument cannot be right.
    """

    def __init__(
        self,
        stages: Sequence[ParallelStage],
        pools: Share | Sequence[Share | None],
        *,
        schedule: Literal["1f1b", "eager", "gpipe"] = "1f1b",
        timeout: float | str | None = None,
        ahead: int | None = 4,
        link: Link | None = None,
    ) -> None:
        if not stages or not all(isinstance(stage, ParallelStage) for stage in stages):
            raise InvalidRequest("stages", stages, "at least one ParallelStage")
        if schedule not in SCHEDULES:
            raise InvalidRequest("schedule", schedule, f"one of {sorted(SCHEDULES)}")
        self._stages = list(stages)
        self._names = [stage.name or f"stage {at}" for at, stage in enumerate(stages)]
        given: list[Share | None] = list(pools) if isinstance(pools, list | tuple) else [pools] * len(stages)  # type: ignore[list-item]  # a share is no sequence
        if len(given) != len(stages):
            raise InvalidRequest("pools", len(given), f"one, or one for each of {len(stages)} stages")
        self._pools: dict[int, Share] = {}
        for at, pool in enumerate(given):
            if pool is None and link is not None:
                continue
            if not isinstance(pool, Share):
                raise InvalidRequest("pools", pool, "a pool or a budget, or one for each stage")
            self._pools[at] = pool
        self._link = link
        self._own = range(min(self._pools, default=0), max(self._pools, default=-1) + 1)
        if len(self._own) != len(self._pools) or not self._pools:
            raise InvalidRequest("pools", given, "pools for stages that follow each other, at least for one")
        self._by_pool = {pool: [at for at in self._own if self._pools[at] is pool] for pool in self._pools.values()}
        self._schedule = SCHEDULES[schedule]
        self._schedule_name = schedule
        self._timeout = None if timeout is None else parse_duration(timeout)
        self._ahead = None if ahead is None else parse_count(ahead, what="ahead", least=1)
        self._streams: dict[int, Streams] = {}
        self._running = False
        self._report: ParallelReport | None = None

    def __repr__(self) -> str:
        return f"<asyncmem.PipelineParallel {self._schedule_name}: {' -> '.join(map(printable, self._names))}>"

    async def run(self, micro_batches: Iterable[object]) -> list[Any]:
        """Take all micro-batches forward and backward, and return the outputs of the last stage's forwards, in order.

        Buffers among the micro-batches are of the first stage's device and stay the caller's; they are in order there.
        Where other processes have stages, all run as many; those without the first stage do not look at theirs, and
        those without the last return an empty list.

        Raises:
            InvalidRequest: A pool has too little memory for what the schedule keeps; the text has the sum. Or it runs.
            StepError: A step raised or took too long, its device failed, or its process ended. It says which; all
                memory is free then.

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
                for pool in self._by_pool:
                    if isinstance(pool, AsyncMemoryPool):
                        await pool.open()
                link = None
                if self._link is not None:
                    pools = tuple(pool_of(self._pools[at]) for at in self._own)
                    plan = Plan(self._schedule_name, len(items), tuple(self._names), self._own, pools)
                    link = await self._link.begin(plan)
                    memory.callback(link.abort, None)
                stage_runs = await self._begin(schedule, memory)
                run = Run(schedule, stage_runs, items, self._timeout, self._ahead, link)
                results, tallies = await run.main()
                self._report = measure(schedule, tallies)
                return results if self._own.stop == len(self._stages) else []
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

    async def _begin(self, schedule: Schedule, until: ExitStack) -> dict[int, StageRun]:
        """Check that there is room in all pools, and wait for all stages' memory, one pool after the other.

        All runs have one order, so none holds up another.
        """
        needs = needs_of(self._stages, self._names, schedule)
        for pool, its in self._by_pool.items():
            total, capacity = sum(needs[at].total for at in its), pool.capacity()
            if total > capacity:
                least = f"at least {format_size(total)}: {'; '.join(str(needs[at]) for at in its)}"
                raise InvalidRequest("limit", Described(format_size(capacity)), least)
        if not self._streams:
            self._streams = {at: Streams(self._pools[at], self._names[at]) for at in self._own}
        leases: dict[int, Lease] = {}
        for pool in sorted(self._by_pool, key=id):
            its = self._by_pool[pool]
            sizes = [max(needs[at].total, GRANULE) for at in its]
            leases |= zip(its, await reserve_ranges(pool, sizes, "pipeline parallel", until), strict=True)
        return {at: StageRun(at, self._stages, needs[at], self._streams[at], leases[at], until) for at in self._own}


@dataclass(eq=False)
class Run:
    """Takes micro-batches through the stages. Nothing of it outlives `main`."""

    schedule: Schedule
    stage_runs: Mapping[int, StageRun]
    micro_batches: Sequence[object]
    timeout: float | None
    ahead: int | None
    link: LinkRun | None

    def __post_init__(self) -> None:
        # What has been sent to a step of a stage that has not taken it yet.
        self._messages: dict[tuple[int, Step], tuple[object, Transfer]] = {}
        self._came: defaultdict[tuple[int, Step], anyio.Event] = defaultdict(anyio.Event)
        self._scope: anyio.CancelScope | None = None
        self._error: StepError | None = None
        self._results: list[object] = [None] * len(self.micro_batches)

    async def main(self) -> tuple[list[object], list[StageTally]]:
        """Run all stages until everything is done, and return the outputs of the last one's forwards, and figures.

        Raises:
            StepError: A step failed. Everything is free then.
        """
        done = False
        tallies: list[StageTally] = []
        try:
            async with anyio.create_task_group() as tasks:
                self._scope = tasks.cancel_scope
                if self.link is None:
                    self._start(tasks)
                else:
                    tasks.start_soon(self._stop_when_another_fails, self.link)
                    async with anyio.create_task_group() as own:
                        self._start(own)
                    try:
                        tallies = await self.link.finish([tally(one) for one in self.stage_runs.values()])
                    except StepError as error:
                        self._stop(error)
                    tasks.cancel_scope.cancel()  # no failure can come any more
            if self._error is not None:
                raise self._error
            done = True
        finally:
            if self.link is not None and not done:
                self.link.abort(self._error)
            self._free_what_is_left(results=not done)
        return self._results, tallies or [tally(one) for one in self.stage_runs.values()]

    def _start(self, tasks: TaskGroup) -> None:
        for at, stage_run in self.stage_runs.items():
            tasks.start_soon(self._take_steps, at, stage_run, name=stage_run.name)
            for forward, other in ((True, at - 1), (False, at + 1)):
                if self.link is not None and 0 <= other < len(self.schedule.steps) and other not in self.stage_runs:
                    tasks.start_soon(self._receive, at, stage_run, forward, self.link)

    # -- other processes ---------------------------------------------------------------------------------------------

    async def _stop_when_another_fails(self, link: LinkRun) -> None:
        self._stop(await link.failure())

    async def _receive(self, at: int, stage_run: StageRun, forward: bool, link: LinkRun) -> None:
        """Take what the steps of one direction take from another process."""
        for step in self.schedule.steps[at]:
            if step.forward is forward:
                try:
                    self._messages[at, step] = await stage_run.receive(step, link)
                except StepError as error:  # of another process
                    self._stop(error)
                    return
                except Exception as error:  # noqa: BLE001  # it is the step's
                    self._fail(stage_run, step, error)
                    return
                self._came[at, step].set()

    # -- a stage's task ------------------------------------------------------------------------------------------------

    async def _take_steps(self, at: int, stage_run: StageRun) -> None:
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

    async def _take_step(self, at: int, stage_run: StageRun, step: Step) -> None:
        last = len(self.schedule.steps) - 1
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
            elif to in self.stage_runs:
                message = _, queued.sent = await stage_run.send(output, queued, self.stage_runs[to])
                self._messages[to, step] = message
                self._came[to, step].set()
            elif to >= 0:
                assert self.link is not None
                queued.sent = await stage_run.send_away(output, queued, self.link)
        finally:
            kept: tuple[object, ...] = ()
            if step.forward:
                kept = stage_run.kept[number] = context.saved
            stage_run.leave((received, saved, context.saved, output), but=(kept, self._results[number], fed))

    # -- the device, at a distance -------------------------------------------------------------------------------------

    async def _follow(self, stage_run: StageRun, upto: int) -> bool:
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

    def _fail(self, stage_run: StageRun, step: Step, error: BaseException) -> None:
        clear_frames(error)
        failed = StepError(stage_run.name, step.micro_batch, forward=step.forward, reason=describe_error(error))
        failed.__cause__ = error
        self._stop(failed)

    def _stop(self, error: StepError) -> None:
        if self._error is None:
            self._error = error
            assert self._scope is not None
            self._scope.cancel()

    def _free_what_is_left(self, *, results: bool) -> None:
        free_buffers(list(self._messages.values()))
        for stage_run in self.stage_runs.values():
            stage_run.leave(list(stage_run.kept.values()), but=())
            stage_run.kept.clear()
        if results:
            free_buffers(self._results)
