"""`@stage`: a plain async function as a part of a pipeline, and the share of memory that it is called with."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeAlias, TypeVar, Unpack, overload

from asyncmem.devices.base import OptionalStreamT_co
from asyncmem.errors import InvalidRequest
from asyncmem.pool.share import RequestTerms, Share
from asyncmem.units import parse_count, parse_duration, parse_size

if TYPE_CHECKING:
    from collections.abc import Iterable

    from asyncmem.core import Batch, Buffer, Ready, Request
    from asyncmem.units import Size

A = TypeVar("A")
B = TypeVar("B")


class StageShare(Share, Generic[OptionalStreamT_co]):
    """A stage's share of its pipeline's memory, whose buffers are at home on the stage's stream.

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
        )

    return make if function is None else make(function)


def as_stage(source: Stage[A, B] | Function[A, B]) -> Stage[A, B]:
    """Return a stage, or what a plain async function is as one."""
    return source if isinstance(source, Stage) else stage(source)


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
