"""`@stage`: an async function as a part of a pipeline; and how memory is divided so that no stage blocks another.

What a stage has allocated is held until the stages behind it are done with it. A stage with credit has a range of
memory of its own, in which each item takes all its credit at once, or waits. So the last of them always proceeds,
once its earlier items have left; so its input leaves the stage before it, which proceeds then; and so on to the first.

Stages without credit share what is left. A stage and all before it together are held to that without what is kept for
the stages behind. The same follows for items that need no more than an equal part of what is left, as long as free
memory is not in pieces.

A stage that declares `credit=0` takes nothing, and nothing is kept for it. That is not learnt from items: say three
stages have room for three items, the last two have taken nothing so far, and the oldest item has one of the three. If
the next item may take another now, a single one is left, and the oldest may by its part want two, and never end. If it
may not, no two items are under way side by side.
"""

import inspect
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeAlias, TypeVar, Unpack, overload

from asyncmem.core import GRANULE, Batch, Buffer, Ready, Request
from asyncmem.devices import Stream
from asyncmem.devices.base import OptionalStreamT_co
from asyncmem.errors import Described, InvalidRequest
from asyncmem.figures import format_count, format_size
from asyncmem.pool import Budget, Lease
from asyncmem.pool.share import RequestTerms, Share
from asyncmem.text import quoted
from asyncmem.units import Size, parse_count, parse_duration, parse_size

A = TypeVar("A")
B = TypeVar("B")


class StageShare(Share, Generic[OptionalStreamT_co]):
    """A stage's share of its pipeline's memory, whose buffers have the stage's stream as their home.

    It has all the ways to allocate that a pool has. For a stage with credit it is a lease of so many bytes, a new one
    for each item: nothing waits in it, and what is above the credit raises `OutOfMemoryError`.

    `StageShare[HostStream]` tells type checkers which streams the device has.

    Attributes:
        stream: Where the stage queues its work; None where it named none.
    """

    stream: OptionalStreamT_co

    def allocate(self, size: int | str, **terms: Unpack[RequestTerms]) -> Buffer:
        """Allocate as `AsyncMemoryPool.allocate` does, on the stage's stream where none is named."""
        return super().allocate(size, **self._on_stream(terms))

    def allocate_async(self, size: int | str, **terms: Unpack[RequestTerms]) -> Ready[Buffer] | Request[Buffer]:
        """Allocate as `AsyncMemoryPool.allocate_async` does, on the stage's stream where none is named."""
        return super().allocate_async(size, **self._on_stream(terms))

    def allocate_batch(
        self, sizes: Iterable[int | str], **terms: Unpack[RequestTerms]
    ) -> Ready[Batch] | Request[Batch]:
        """Allocate as `AsyncMemoryPool.allocate_batch` does, on the stage's stream where none is named."""
        return super().allocate_batch(sizes, **self._on_stream(terms))

    def try_allocate(self, size: int | str, *, stream: object = None, tag: str | None = None) -> Buffer | None:
        """Allocate as `AsyncMemoryPool.try_allocate` does, on the stage's stream where none is named."""
        return super().try_allocate(size, stream=self.stream if stream is None else stream, tag=tag)

    def _on_stream(self, terms: RequestTerms) -> RequestTerms:
        if terms.get("stream") is None:
            terms["stream"] = self.stream
        return terms


Function = Callable[[A, StageShare[Any]], Awaitable[B]]


@dataclass(frozen=True, slots=True)
class Stage(Generic[A, B]):
    """An async function of an item and the stage's share of memory, and how a pipeline runs it. Made by `@stage`.

    It can still be called as the function it was.
    """

    function: Function[A, B]
    """What is awaited for each item: ``async def forward(item, pool)``; its result is the next stage's item."""
    name: str
    """The function's name, for errors and reports."""
    workers: int = 1
    """How many items are worked on at once."""
    credit: int | None = None
    """Bytes that one item needs here; None is unknown, 0 is none."""
    device: str | None = None
    """The device whose memory the share is of; None for that of the pipeline's pool."""
    stream: object = None
    """Where the stage's work is queued: a stream of the device, or a name to make one by; None leaves it open."""
    timeout: float | None = None
    """The most seconds that one item may take."""
    pool: int | None = None
    """Bytes that it may hold on each worker of a cluster; None for a part of what the worker has."""

    def __repr__(self) -> str:
        return f"<asyncmem.pipeline.Stage {quoted(self.name)}: {format_count(self.workers, 'worker')}>"

    def __call__(self, item: A, pool: StageShare[Any]) -> Awaitable[B]:
        """Call the function."""
        return self.function(item, pool)


AnyStage: TypeAlias = Stage[Any, Any]


@overload
def stage(function: Function[A, B], /) -> Stage[A, B]: ...
@overload
def stage(
    *,
    workers: int = 1,
    credit: Size | None = None,
    device: str | None = None,
    stream: object = None,
    timeout: float | str | None = None,
    pool: Size | None = None,
) -> Callable[[Function[A, B]], Stage[A, B]]: ...
def stage(
    function: Function[A, B] | None = None,
    /,
    *,
    workers: int = 1,
    credit: Size | None = None,
    device: str | None = None,
    stream: object = None,
    timeout: float | str | None = None,
    pool: Size | None = None,
) -> Stage[A, B] | Callable[[Function[A, B]], Stage[A, B]]:
    """Make an async function a stage: ``@stage``, or ``@stage(workers=4, credit="8 MiB")``.

    Args:
        function: ``async def forward(item, pool)``. What it allocates from `pool`, its share, is held for as long as
            the item it returns, and what is made of it without a copy, is under way.
        workers: How many items it works on at once.
        credit: The most bytes that one item needs here: all that it allocates, each buffer counted in units of 512
            bytes. Each item gets so much at once and in one piece, and for each worker it is kept free. Zero
            says that it allocates nothing: nothing is kept for it. Without credit, the stage shares with others what
            is left, and a part is kept for it.
        device: The device whose memory it allocates, by the process's own pool; None for the pipeline's pool.
        stream: Where it queues its work: a stream of the device, or a name for one that the pipeline makes. Items are
            in order there when they come, and it is the home of what is allocated. None leaves streams to the stage.
        timeout: Seconds after which an item fails the pipeline; the function is cancelled then.
        pool: The most that it may hold on each worker of a cluster, for `Pipeline.place`; in one process, stages share
            the pipeline's pool.

    Raises:
        InvalidRequest: It is no async function, or an argument cannot be right.
    """

    def make(function: Function[A, B]) -> Stage[A, B]:
        return Stage(
            _asynchronous(function),
            name=getattr(function, "__name__", type(function).__name__),
            workers=parse_count(workers, what="workers", least=1, most=1 << 16),
            credit=None if credit is None else parse_size(credit, what="credit"),
            device=device,
            stream=stream,
            timeout=None if timeout is None else _limit(timeout),
            pool=None if pool is None else parse_size(pool, what="pool"),
        )

    return make if function is None else make(function)


def _asynchronous(function: Function[A, B]) -> Function[A, B]:
    call = getattr(function, "__call__", None)  # noqa: B004 - what it is matters, not whether it is there
    if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call):
        return function
    raise InvalidRequest("stage", function, "an async function: async def forward(item, pool)")


def _limit(timeout: float | str) -> float:
    seconds = parse_duration(timeout)
    if seconds == 0:
        raise InvalidRequest("timeout", timeout, "more than 0 seconds, or None")
    return seconds


IN_FLIGHT = 4
"""Items under way for each worker of the pipeline, where nothing else is said."""

AHEAD = 2
"""Items that each worker of a stage with several may begin while an earlier item is not finished."""


RESULTS = 2
"""Items for which the last stage has room besides: a loop holds one result while it waits for the next. As that lies
anywhere in the stage's range, two more leave room for an item on one side of it."""


@dataclass(frozen=True, slots=True)
class StagePlan:
    """A stage's part of the plan. Sizes are bytes."""

    kept: int
    """What is kept free for it: a range of its own if it has credit, else what those before it leave."""
    limit: int
    """What it may hold; without credit, together with those before it that have none either."""
    window: int
    """How many items it may have begun beyond the oldest that it has not passed on."""


def divide(stages: Sequence[AnyStage], limit: int, *, final: bool = True) -> list[StagePlan]:
    """Divide a pool's limit between stages in their order.

    Args:
        stages: Those that use the pool.
        limit: Bytes that it may have.
        final: Whether what the last of them makes are results.

    Raises:
        InvalidRequest: One item for each worker of all stages is more than the limit; the text has the sum.
    """
    results = [0] * (len(stages) - 1) + [RESULTS if final else 0]
    needs = [granules(stage.credit or 0) * (stage.workers + more) for stage, more in zip(stages, results, strict=True)]
    spare = limit - sum(needs)
    unknown = any(stage.credit is None for stage in stages)
    if spare < 0 or (unknown and spare < GRANULE * len(stages)):
        raise InvalidRequest("limit", Described(format_size(limit)), _sum(stages, needs, results, unknown=unknown))
    weights = _weights(stages, needs)
    # No stage has more items than are under way, so the range of one with credit need not be longer.
    most = IN_FLIGHT * sum(stage.workers for stage in stages) + RESULTS
    kept = [
        min(need + spare * weight // max(sum(weights), 1), granules(stage.credit or limit) * most) // GRANULE * GRANULE
        for stage, need, weight in zip(stages, needs, weights, strict=True)
    ]
    shared = limit - sum(own for stage, own in zip(stages, kept, strict=True) if stage.credit)
    plans = []
    for stage, own in zip(reversed(stages), reversed(kept), strict=True):
        most = own if stage.credit is not None else max(shared, GRANULE)
        plans.append(StagePlan(kept=own, limit=most, window=_window(stage, own)))
        shared -= own if stage.credit is None else 0
    return plans[::-1]


def _weights(stages: Sequence[AnyStage], needs: Sequence[int]) -> list[int]:
    """Weigh what is left over by need; a stage of unknown need counts as the average of the others."""
    known = [need for need in needs if need]
    average = sum(known) // len(known) if known else 1
    return [average if stage.credit is None else need for stage, need in zip(stages, needs, strict=True)]


def _window(stage: AnyStage, kept: int) -> int:
    most = stage.workers * AHEAD if stage.workers > 1 else 1
    return most if not stage.credit else min(most, kept // granules(stage.credit))


def granules(nbytes: int) -> int:
    """Return the bytes that a buffer of so many is counted as."""
    return -(-nbytes // GRANULE) * GRANULE


def _sum(stages: Sequence[AnyStage], needs: Sequence[int], results: Sequence[int], *, unknown: bool) -> str:
    parts = [
        f"{stage.name} ({_holders(stage.workers, more)}) x {format_size(stage.credit)} = {format_size(need)}"
        for stage, need, more in zip(stages, needs, results, strict=True)
        if stage.credit
    ]
    others = ", and some for stages without credit" if unknown else ""
    return f"at least {format_size(sum(needs))}: {' + '.join(parts)}{others}"


def _holders(workers: int, results: int) -> str:
    return format_count(workers, "worker") + (f" and {results} for results" if results else "")


class StageBudget(StageShare[Stream | None], Budget):
    """The share of a stage that has not said what it needs; of one that has, all of its items' memory.

    That is over a range of memory, and `waits` for what becomes free there and nowhere else: what is in pieces
    elsewhere is no matter. As an item takes its lease at once and in one piece, and earlier items leave, the range is
    whole again sooner or later; so every item gets its lease.
    """


class StageLease(StageShare[Stream | None], Lease):
    """The share of a stage for one item: all of its credit, at once and in one piece."""
