"""`Pipeline`: async functions joined so that memory, and nothing else, holds them back."""

import itertools
from collections.abc import AsyncIterable, Callable, Iterable, Sequence
from contextlib import ExitStack
from functools import cache, partial
from importlib.util import find_spec
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, Literal, Self, TypeVar, cast, overload

import anyio
from anyio.abc import TaskGroup

from asyncmem.errors import DeadlockError, DeviceError, InvalidRequest
from asyncmem.facts import OwnerInfo
from asyncmem.figures import format_size
from asyncmem.pipeline.report import PipelineReport, show
from asyncmem.pipeline.resources import BorrowedStreams
from asyncmem.pipeline.run import ActiveStage, Results, Run
from asyncmem.pipeline.stage import IN_FLIGHT, AnyStage, Function, Stage, StageBudget, StagePlan, divide, stage
from asyncmem.pool import AsyncMemoryPool, Budget
from asyncmem.pool.pool import pool_of
from asyncmem.pool.share import Share, fail_first, reserve_ranges
from asyncmem.runtime import device
from asyncmem.stats import WaiterInfo
from asyncmem.text import printable, quoted
from asyncmem.units import Size, parse_count

if TYPE_CHECKING:
    from asyncmem.distributed.placed import PlacedPipeline

A = TypeVar("A")
B = TypeVar("B")
C = TypeVar("C")
D = TypeVar("D")
E = TypeVar("E")

_numbers = itertools.count(1)

Link = Stage[A, B] | Function[A, B]
"""What a pipeline takes for a stage: one made by `@stage`, or a plain async function."""


class Pipeline(Generic[A, B]):
    """Stages that run at the same time: ``async with Pipeline(decode, forward, pool=pool) as pipe``.

    Each stage allocates from a share of its own, so a fast stage that fills its memory waits itself, and later stages
    do not. If stages declare by `credit` (see `@stage`) what an item needs, the pipeline cannot deadlock. A part of the
    memory is reserved for each stage, except for `credit=0`. Inside the block, call `map` for a source, as often as you
    like.

    Args:
        *stages: Async functions ``async def forward(item, pool)``, or stages made of them by `@stage`, in order.
        pool: The pool or budget that they share. Other owners of its memory make them wait. With `place` it is the
            client's, for items that come and go, and may be None.
        name: The name in messages and statistics.

    Raises:
        InvalidRequest: A stage is not an async function, there is none, or the pool is not a pool.
    """

    @overload
    def __init__(self, a: Link[A, B], /, *, pool: Share | None = None, name: str | None = None) -> None: ...
    @overload
    def __init__(
        self, a: Link[A, C], b: Link[C, B], /, *, pool: Share | None = None, name: str | None = None
    ) -> None: ...
    @overload
    def __init__(
        self, a: Link[A, C], b: Link[C, D], c: Link[D, B], /, *, pool: Share | None = None, name: str | None = None
    ) -> None: ...
    @overload
    def __init__(
        self,
        a: Link[A, C],
        b: Link[C, D],
        c: Link[D, E],
        d: Link[E, B],
        /,
        *,
        pool: Share | None = None,
        name: str | None = None,
    ) -> None: ...
    @overload
    def __init__(self, *stages: Link[Any, Any], pool: Share | None = None, name: str | None = None) -> None: ...
    def __init__(self, *stages: Link[Any, Any], pool: Share | None = None, name: str | None = None) -> None:
        if not stages:
            raise InvalidRequest("stages", stages, "at least one")
        if pool is not None and not isinstance(pool, Share):
            raise InvalidRequest("pool", pool, "a pool or a budget")
        self.name = name or f"pipeline-{next(_numbers)}"
        self._stages: list[AnyStage] = [one if isinstance(one, Stage) else stage(one) for one in stages]
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
        if self._pool is None:
            raise InvalidRequest("pool", None, "a pool or a budget", hint="on a cluster, enter pipeline.place(cluster)")
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

    def place(
        self,
        cluster: object,
        *,
        window: Size | None = None,
        limit: Size | None = None,
        timeout: float | str = 30.0,
        types: Sequence[type] = (),
        share: bool = True,
        ucx: bool = False,
    ) -> "PlacedPipeline[A, B]":
        """Run the stages on the workers of a Dask cluster: ``async with pipeline.place(cluster) as pipe``.

        Needs the extra `dask`. The client's loop is asyncio's or uvloop's.

        Args:
            cluster: A cluster or client of Dask's, or a scheduler's address.
            window: Bytes to keep for items on their way from one process to another, for each pair of them; None for
                what there is room for, up to 64 MiB.
            limit: The most that the stages may have on each worker; None for 60 % of its memory limit, or of what is
                free of a GPU.
            timeout: Seconds without a sign of life after which a worker is lost, and for which a stage that has no
                worker waits for another.
            types: The dataclasses and named tuples that items have, besides arrays, plain values, and tuples, lists and
                dicts of them.
            share: Whether processes of one host share memory; else bytes go between them as between hosts.
            ucx: Whether bytes go by UCX between workers that have `ucxx`; else by TCP. It encrypts nothing, so TCP
                stays where the cluster demands encryption.

        Raises:
            InvalidRequest: An argument cannot be right.
            ModuleNotFoundError: Dask is missing; the text says what to install.
        """
        from asyncmem.distributed.placed import PlacedPipeline

        return PlacedPipeline(
            self._stages, cluster, name=self.name, pool=self._pool, window=window, limit=limit, timeout=timeout,
            types=types, share=share, ucx=ucx,
        )  # fmt: skip

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
        most = IN_FLIGHT * sum(one.workers for one in self._stages)
        if in_flight != "auto":
            most = parse_count(in_flight, what="in_flight", least=1, most=1 << 20)
        helpers = [partial(_watch, self._active, self._budgets, self._consumers_wait)]
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
    ranges = [plan.kept for one, plan in zip(stages, plans, strict=True) if one.credit]
    leases = await reserve_ranges(budget, ranges, budget.name, resources)
    found = []
    joint = budget
    for one, plan in zip(reversed(stages), reversed(plans), strict=True):
        stream = one.stream
        if stream is not None:
            stream = named(stream) if isinstance(stream, str) else pool_of(budget).device.stream_of(stream)
        parent: Share = budget
        if one.credit:
            parent = leases.pop()
        elif one.credit is None:
            parent = joint = Budget(joint, f"{budget.name}, up to {one.name}", plan.limit)
        share = StageBudget(parent, one.name, plan.limit, waits=True if one.credit else None)
        share.stream = stream
        found.append(ActiveStage(one, plan, share))
    return found[::-1]


# -- deadlocks ---------------------------------------------------------------------------------------------------------

# As long as stages keep to the plan and free memory is in one piece, one of them can always go on. The proof that none
# can: each worker that has an item waits for memory, each consumer waits for a result and holds none, others hold
# nothing of the pool, and no memory is on its way. The checks come three times in `stall_after`, and it takes several
# without progress in between.


async def _watch(stages: Sequence[ActiveStage], budgets: Sequence[Budget], consumers_wait: Callable[[], bool]) -> None:
    """Look three times in the pool's `stall_after`, and fail the last waiting stage once none can go on.

    Args:
        stages: All of a pipeline's stages, in order.
        budgets: The budgets that hold what they allocate, one for each pool.
        consumers_wait: Tells whether all consumers wait for a result, and hold none.
    """
    pools = [pool_of(budget) for budget in budgets]
    idle = False
    last: object = None
    while (stall_after := pools[0].options.stall_after) is not None:
        await anyio.sleep(stall_after / 3)
        state = [_moved(pool) for pool in pools], [(active.items, active.at_work) for active in stages]
        suspect = state == last and consumers_wait() and all(map(_holds_all, budgets, pools))
        if suspect and idle:
            _fail_last(stages)
        # What devices still do may free memory. Once it is done, the pool has until the next look to notice.
        idle = suspect and await _are_idle(pools)
        last = state


def _moved(pool: AsyncMemoryPool) -> object:
    one = pool.stats()
    return one.num_allocations, one.num_frees, one.grows, one.trims, one.spills, one.returns, one.waiting


def _holds_all(budget: Budget, pool: AsyncMemoryPool) -> bool:
    """Return whether all of the memory is held by items under way, and none is coming."""
    whole = pool.stats()
    return not (whole.growing or whole.exported_bytes) and whole.allocated_bytes == budget.stats().allocated_bytes


async def _are_idle(pools: Sequence[AsyncMemoryPool]) -> bool:
    try:
        for pool in pools:
            await pool.device.record_all()
    except DeviceError:
        return False  # the work there gets the error
    return True


def _fail_last(stages: Sequence[ActiveStage]) -> None:
    waiting = [active.share.waiters() for active in stages]
    stuck = [active.share for active, requests in zip(stages, waiting, strict=True) if requests]
    if stuck and all(len(requests) >= active.at_work for active, requests in zip(stages, waiting, strict=True)):
        fail_first(stuck[-1], _error(pool_of(stuck[-1]), stages, waiting))


def _error(
    pool: AsyncMemoryPool, stages: Sequence[ActiveStage], waiting: Sequence[Sequence[WaiterInfo]]
) -> DeadlockError:
    owners = [
        OwnerInfo(
            owner=f"stage {active.stage.name}",
            held=active.share.stats().allocated_bytes,
            waiting=sum(one.nbytes for one in requests),
            age=max(one.age for one in requests),
        )
        for active, requests in zip(stages, waiting, strict=True)
        if requests
    ]
    stats = pool.stats()
    free = (stats.limit or 0) - stats.allocated_bytes
    pieces = f"of {format_size(free)} free, {format_size(stats.largest_hole)} are in one piece"
    hints = [pieces, "raise the limit", "state by @stage(credit=...) how much one item needs"]
    return DeadlockError(pool=pool.name, owners=owners, hints=hints)
