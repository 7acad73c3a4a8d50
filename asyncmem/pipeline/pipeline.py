"""`Pipeline`: async functions joined so that memory, and nothing else, holds them back."""

from __future__ import annotations

import itertools
from contextlib import ExitStack
from functools import cache, partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Generic, Literal, Self, TypeVar, cast, overload

import anyio

from asyncmem.errors import InvalidRequest
from asyncmem.pipeline.deadlock import watch
from asyncmem.pipeline.memory import IN_FLIGHT, StageBudget, divide, reserve_ranges
from asyncmem.pipeline.report import PipelineReport, show
from asyncmem.pipeline.resources import BorrowedStreams, pool_of
from asyncmem.pipeline.run import ActiveStage, Results, Run
from asyncmem.pipeline.stage import Function, Stage, as_stage
from asyncmem.pool import AsyncMemoryPool, Budget
from asyncmem.pool.share import Share
from asyncmem.runtime import device
from asyncmem.text import printable, quoted
from asyncmem.units import parse_count

if TYPE_CHECKING:
    from collections.abc import AsyncIterable, Iterable, Sequence
    from types import TracebackType

    from anyio.abc import TaskGroup

    from asyncmem.pipeline.memory import StagePlan
    from asyncmem.pipeline.stage import AnyStage

A = TypeVar("A")
B = TypeVar("B")
C = TypeVar("C")
D = TypeVar("D")
E = TypeVar("E")

_numbers = itertools.count(1)

Joined = Stage[A, B] | Function[A, B]
"""What a pipeline takes for a stage: one made by `@stage`, or a plain async function."""


class Pipeline(Generic[A, B]):
    """Stages that run at the same time: ``async with Pipeline(decode, forward, pool=pool) as pipe``.

    Each stage allocates from a share of its own, so a fast stage that fills its memory waits itself, and later stages
    do not. If stages declare by `credit` (see `@stage`) what an item needs, the pipeline cannot deadlock. A part of the
    memory is reserved for each stage, except for `credit=0`. Inside the block, call `map` for a source, as often as you
    like.

    Args:
        *stages: Async functions ``async def forward(item, pool)``, or stages made of them by `@stage`, in order.
        pool: The pool or budget that they share. Other owners of its memory make them wait.
        name: The name in messages and statistics.

    Raises:
        InvalidRequest: A stage is not an async function, there is none, or the pool is not a pool.
    """

    @overload
    def __init__(self, first: Joined[A, B], /, *, pool: Share, name: str | None = None) -> None: ...
    @overload
    def __init__(self, first: Joined[A, C], last: Joined[C, B], /, *, pool: Share, name: str | None = None) -> None: ...
    @overload
    def __init__(
        self, first: Joined[A, C], second: Joined[C, D], last: Joined[D, B], /, *, pool: Share, name: str | None = None
    ) -> None: ...
    @overload
    def __init__(
        self,
        first: Joined[A, C],
        second: Joined[C, D],
        third: Joined[D, E],
        last: Joined[E, B],
        /,
        *,
        pool: Share,
        name: str | None = None,
    ) -> None: ...
    @overload
    def __init__(self, *stages: Joined[Any, Any], pool: Share, name: str | None = None) -> None: ...
    def __init__(self, *stages: Joined[Any, Any], pool: Share, name: str | None = None) -> None:
        if not stages:
            raise InvalidRequest("stages", stages, "at least one")
        if not isinstance(pool, Share):
            raise InvalidRequest("pool", pool, "a pool or a budget")
        self.name = name or f"pipeline-{next(_numbers)}"
        self._stages: list[AnyStage] = [as_stage(one) for one in stages]
        self._pool = pool
        self._resources = ExitStack()
        self._active: list[ActiveStage] = []
        self._budgets: list[Budget] = []
        self._tasks: TaskGroup | None = None
        self._runs: list[Run] = []
        self._items = 0  # of runs that are over, as their seconds are
        self._seconds = 0.0
        self._last: PipelineReport | None = None

    def __repr__(self) -> str:
        state = "open" if self._tasks is not None else "not open"
        stages = " -> ".join(printable(one.name) for one in self._stages)
        return f"<asyncmem.Pipeline {quoted(self.name)}: {stages}, {state}>"

    async def __aenter__(self) -> Self:
        """Open the pool and divide its memory between the stages.

        Raises:
            InvalidRequest: The credits are more than the pool's limit; the text has the sum. Or it was entered before.
        """
        if self._tasks is not None or self._last is not None:
            raise InvalidRequest("pipeline", self, "one that was not entered before; make another")
        with ExitStack() as resources:
            self._active, self._budgets = await _activate(self.name, self._stages, self._pool, resources)
            self._tasks = await anyio.create_task_group().__aenter__()
            self._resources = resources.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Cancel what is under way, wait for its end, and give the shares back. Results that are held stay valid."""
        assert self._tasks is not None
        for run in self._runs:
            run.stop()
        try:
            # The group would wrap an error of the block, which none of its tasks has raised.
            cancelled = isinstance(error, anyio.get_cancelled_exc_class())
            await self._tasks.__aexit__(*((kind, error, trace) if cancelled else (None, None, None)))
        finally:
            self._last = self.report()
            self._tasks = None
            self._resources.close()

    def map(
        self,
        source: Iterable[A] | AsyncIterable[A],
        *,
        ordered: bool = True,
        in_flight: int | Literal["auto"] = "auto",
        progress: bool = False,
    ) -> Results[B]:
        """Run the pipeline over a source: ``async for y in pipe.map(source)``.

        Args:
            source: An iterable, which is iterated on the event loop's thread and must not block it, or an async
            iterable.
            ordered: Whether results come in the order of the source; else as they are finished.
            in_flight: The most items at once between the source and the ``async for``. "auto" is four for each worker:
                one that it works on, and some that wait, so that tasks need not switch at each item.
            progress: Show the report live in the terminal, by `rich`.

        Raises:
            InvalidRequest: The pipeline is not open, or an argument cannot be right.
        """
        if self._tasks is None:
            raise InvalidRequest("pipeline", self, 'one that is open: "async with Pipeline(...) as pipe"')
        asked: object = in_flight  # or type checkers would take the third case for impossible
        if asked == "auto":
            most = IN_FLIGHT * sum(stage.workers for stage in self._stages)
        elif isinstance(asked, str):
            raise InvalidRequest("in_flight", in_flight, '"auto", or a whole number from 1')
        else:
            most = parse_count(in_flight, what="in_flight", least=1)
        helpers = [partial(watch, self._active, self._budgets, self._consumers_wait)]
        if progress:
            if find_spec("rich") is None:
                hint = 'install rich, or "asyncmem[cli]"'
                raise InvalidRequest("progress", progress, "False where rich is not installed", hint=hint)
            helpers.append(partial(show, self.report))
        run = Run(self._active, cast("Iterable[object]", source), ordered=ordered, in_flight=most, helpers=helpers)
        return Results(run, self._start)

    def report(self) -> PipelineReport:
        """Return the figures so far, stage by stage; after the block, the totals."""
        if self._last is not None:
            return self._last
        if not self._active:
            raise InvalidRequest("pipeline", self, "one that has been opened")
        seconds = self._seconds + sum(run.seconds for run in self._runs)
        return PipelineReport(
            stages=tuple(one.report(seconds) for one in self._active),
            items=self._items + sum(run.handed for run in self._runs),
            seconds=seconds,
            limit_bytes=sum(budget.stats().limit or 0 for budget in self._budgets),
            peak_bytes=sum(budget.stats().peak_allocated for budget in self._budgets),
        )

    def _start(self, run: Run) -> None:
        if self._tasks is None:
            raise InvalidRequest("pipeline", self, "one that is open: its block has ended")
        self._forget_ended_runs()
        self._runs.append(run)
        self._tasks.start_soon(run.main, name=self.name)

    def _consumers_wait(self) -> bool:
        return all(run.consumer_waits for run in self._runs if not run.over.is_set())

    def _forget_ended_runs(self) -> None:
        for run in [one for one in self._runs if one.over.is_set()]:
            self._runs.remove(run)
            self._items += run.handed
            self._seconds += run.seconds


async def _activate(
    name: str, stages: Sequence[AnyStage], pool: Share, resources: ExitStack
) -> tuple[list[ActiveStage], list[Budget]]:
    """Open the pools, and make the stages with their shares and streams, and a budget for each device.

    Args:
        name: What statistics call the budgets.
        stages: The stages in order.
        pool: Where those get memory that name no device.
        resources: Gets what gives all of it back.

    Raises:
        InvalidRequest: The credits are more than a pool's limit.
    """
    roots = [await _root(stage, pool) for stage in stages]
    groups = {root: [at for at, other in enumerate(roots) if other is root] for root in roots}
    plans = {
        root: divide([stages[at] for at in group], root.capacity(), final=group[-1] == len(stages) - 1)
        for root, group in groups.items()
    }
    budgets = []
    found: dict[int, ActiveStage] = {}
    for root, group in groups.items():
        budgets.append(budget := Budget(root, name, root.capacity()))
        resources.callback(budget.close)
        made = await _make(budget, [stages[at] for at in group], plans[root], resources)
        found |= zip(group, made, strict=True)
    return [found[at] for at in range(len(stages))], budgets


async def _root(stage: AnyStage, pool: Share) -> Share:
    if isinstance(pool, AsyncMemoryPool):
        await pool.open()
    if stage.device is None or stage.device == pool_of(pool).device.name:
        return pool
    other = device(stage.device).pool
    await other.open()
    return other


async def _make(
    budget: Budget, stages: Sequence[AnyStage], plans: Sequence[StagePlan], resources: ExitStack
) -> list[ActiveStage]:
    """Make the shares, the last first.

    A stage with credit has a range of memory; one whose credit is 0 has an empty budget. The others have budgets, each
    beside a budget that holds all before it to what is not kept for it.
    """
    streams = BorrowedStreams(pool_of(budget))
    resources.callback(streams.give_back)
    named = cache(streams.stream)  # stages that name the same one have the same
    ranges = [plan.kept for stage, plan in zip(stages, plans, strict=True) if stage.credit]
    leases = await reserve_ranges(budget, ranges, budget.name, resources)
    found = []
    joint = budget
    for stage, plan in zip(reversed(stages), reversed(plans), strict=True):
        stream = stage.stream
        if stream is not None:
            stream = named(stream) if isinstance(stream, str) else pool_of(budget).device.stream_of(stream)
        if stage.credit:
            share = StageBudget(leases.pop(), stage.name, plan.kept, stream, waits=True)
        elif stage.credit == 0:
            share = StageBudget(budget, stage.name, 0, stream)
        else:
            joint = Budget(joint, f"{budget.name}, up to {stage.name}", plan.limit)
            share = StageBudget(joint, stage.name, plan.limit, stream)
        found.append(ActiveStage(stage, plan, share))
    return found[::-1]
