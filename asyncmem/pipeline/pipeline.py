"""`Pipeline`: async functions joined so that memory, and nothing else, holds them back."""

from __future__ import annotations

import itertools
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, Literal, Self, TypeVar, cast, overload

import anyio

from asyncmem.errors import InvalidRequest
from asyncmem.pipeline.lookout import Lookout
from asyncmem.pipeline.plan import IN_FLIGHT
from asyncmem.pipeline.report import PipelineReport
from asyncmem.pipeline.results import Results
from asyncmem.pipeline.run import Run
from asyncmem.pipeline.settle import Settled, settle
from asyncmem.pipeline.stage import Function, Stage, as_stage
from asyncmem.pool.loops import running_loop
from asyncmem.pool.share import Share
from asyncmem.units import parse_count

if TYPE_CHECKING:
    from collections.abc import AsyncIterable, Callable, Coroutine, Iterable
    from types import TracebackType

    from anyio.abc import TaskGroup

    from asyncmem.pipeline.plan import AnyStage

A = TypeVar("A")
B = TypeVar("B")
C = TypeVar("C")
D = TypeVar("D")
E = TypeVar("E")

_numbers = itertools.count(1)

Joined = Stage[A, B] | Function[A, B]
"""What a pipeline takes for a stage: one made by `@stage`, or a plain async function."""


class Pipeline(Generic[A, B]):
    """Stages that work side by side: ``async with Pipeline(decode, forward, pool=pool) as pipe``.

    Each stage allocates from a share of its own, so a fast stage that fills the memory holds up itself and not those
    behind it. Where stages say by `credit` (see `@stage`) what one item needs, the whole cannot lock itself up. Nothing
    is kept free behind the last stage that may take memory. Inside the block, `map` runs it over a source, as often as
    is wanted.

    Args:
        *stages: Async functions ``async def forward(item, pool)``, or stages made of them by `@stage`, in order.
        pool: The pool or budget that they divide between them. What others hold of it makes them wait.
        name: What messages and statistics call it.

    Raises:
        InvalidRequest: A stage is no async function, or there is none; or the pool is none.
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
        self._settled = Settled([], [], [])
        self._tasks: TaskGroup | None = None
        self._runs: list[Run] = []
        self._items = 0  # of runs that are over, as their seconds are
        self._seconds = 0.0
        self._clock: Callable[[], float] | None = None
        self._lookout: Lookout | None = None
        self._last: PipelineReport | None = None

    def __repr__(self) -> str:
        state = "open" if self._tasks is not None else "not open"
        return f"<asyncmem.Pipeline {self.name!r}: {' -> '.join(one.name for one in self._stages)}, {state}>"

    async def __aenter__(self) -> Self:
        """Open the pool and divide its memory between the stages.

        Raises:
            InvalidRequest: The credits are more than the pool's limit; the text has the sum. Or it was entered before.
        """
        if self._tasks is not None or self._last is not None:
            raise InvalidRequest("pipeline", self, "one that was not entered before; make another")
        loop = running_loop()
        assert loop is not None
        self._clock = loop.now
        self._settled = await settle(self.name, self._stages, self._pool)
        self._lookout = Lookout(self._settled.stations, self._settled.tops, self._consumers_wait)
        self._tasks = await anyio.create_task_group().__aenter__()
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
            self._settled.end()

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
            source: An iterable, which is asked on the event loop's thread and must not block it, or an async iterable.
            ordered: Whether results come in the order of the source; else as they are finished.
            in_flight: The most items that are under way at once, between the source and the ``async for``. "auto" is
                four for each worker: one at hand, and some that wait for it, so that tasks need not switch at each.
            progress: Show the report live in the terminal, by `rich`.

        Raises:
            InvalidRequest: The pipeline is not open, or an argument cannot be right.
        """
        if self._tasks is None:
            raise InvalidRequest("pipeline", self, 'one that is open: "async with Pipeline(...) as pipe"')
        assert self._clock is not None
        assert self._lookout is not None
        asked: object = in_flight  # or type checkers would take the third case for impossible
        if asked == "auto":
            most = IN_FLIGHT * sum(stage.workers for stage in self._stages)
        elif isinstance(asked, str):
            raise InvalidRequest("in_flight", in_flight, '"auto", or a whole number from 1')
        else:
            most = parse_count(in_flight, what="in_flight", least=1)
        run = Run(
            self._settled.stations,
            cast("Iterable[object]", source),
            ordered=ordered,
            in_flight=most,
            clock=self._clock,
            beside=[self._lookout.watch, *([self._display()] if progress else [])],
        )
        return Results(run, self._start)

    def report(self) -> PipelineReport:
        """Answer what it has done so far, stage by stage; after the block, in all."""
        if self._last is not None:
            return self._last
        if not self._settled.stations:
            raise InvalidRequest("pipeline", self, "one that has been opened")
        seconds = self._seconds + sum(run.seconds for run in self._runs)
        return PipelineReport(
            stages=tuple(station.report(seconds) for station in self._settled.stations),
            items=self._items + sum(run.handed for run in self._runs),
            seconds=seconds,
            limit_bytes=sum(budget.own_limit() for budget in self._settled.tops),
            peak_bytes=sum(budget.stats().peak_allocated for budget in self._settled.tops),
        )

    def _start(self, run: Run) -> None:
        if self._tasks is None:
            raise InvalidRequest("pipeline", self, "one that is open: its block has ended")
        self._forget_runs_that_are_over()
        self._runs.append(run)
        self._tasks.start_soon(run.main, name=self.name)

    def _consumers_wait(self) -> bool:
        return all(run.consumer_waits for run in self._runs if not run.over.is_set())

    def _display(self) -> Callable[[], Coroutine[Any, Any, None]]:
        try:
            from asyncmem.pipeline.progress import show
        except ImportError as missing:
            hint = 'install rich, or "asyncmem[cli]"'
            raise InvalidRequest("progress", True, "False where rich is not installed", hint=hint) from missing
        return partial(show, self.report)

    def _forget_runs_that_are_over(self) -> None:
        for run in [one for one in self._runs if one.over.is_set()]:
            self._runs.remove(run)
            self._items += run.handed
            self._seconds += run.seconds
