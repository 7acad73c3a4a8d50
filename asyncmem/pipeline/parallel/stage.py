"""What a stage of a model does with a micro-batch, and how much memory it says that takes."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, final

from asyncmem.arrays import extent
from asyncmem.devices import HostStream
from asyncmem.devices.base import StreamT_co
from asyncmem.errors import InvalidRequest
from asyncmem.figures import format_size
from asyncmem.pipeline.parallel.memory import granules
from asyncmem.text import quoted
from asyncmem.units import parse_size

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asyncmem.arrays import Array
    from asyncmem.core import Buffer
    from asyncmem.pipeline.parallel.memory import StepMemory, Use
    from asyncmem.pipeline.parallel.schedule import Step
    from asyncmem.units import Size

P = ParamSpec("P")


@final
class StepContext(Generic[StreamT_co]):
    """What a step works with: its stream, its stage's memory, and what it leaves for the backward. Made by the runner.

    `StepContext[HostStream]` tells type checkers which streams the device has.

    Attributes:
        stage: The stage's name.
        step: Which step it is.
        stream: Where its work is queued. What it was given is in order there, and its output is taken from there.
        saved: What `save` was given.
        work: What `run` has queued.
    """

    __slots__ = ("_memory", "saved", "stage", "step", "stream", "work")

    def __init__(self, stage: str, step: Step, stream: StreamT_co, memory: StepMemory) -> None:
        self.stage = stage
        self.step = step
        self.stream = stream
        self._memory = memory
        self.saved: tuple[object, ...] = ()
        self.work: list[Awaitable[object]] = []

    def __repr__(self) -> str:
        return f"<asyncmem.StepContext: {self.step} at {quoted(self.stage)}>"

    @property
    def micro_batch(self) -> int:
        """The number of the micro-batch, counted from 0."""
        return self.step.micro_batch

    async def allocate(self, size: Size, *, use: Use = "working", tag: str | None = None) -> Buffer:
        """Wait for memory at home on the step's stream; see `AsyncMemoryPool.allocate_async`.

        Args:
            size: Bytes.
            use: Which size that the stage states it is a part of: "saved" for what a forward saves, returned or not;
                "output" for what a step returns; "working" for what it frees.
            tag: A label for reports.

        Raises:
            InvalidRequest: It is more than the stage has left of what it stated for that use, or what is left is in
                pieces, because of what the step has freed before.
        """
        return await self._memory.take(parse_size(size), use, self.stream, tag)

    async def empty(
        self, shape: int | Sequence[int], dtype: object = "float32", *, use: Use = "working", tag: str | None = None
    ) -> Array:
        """Wait for a typed array in the same way; see `AsyncMemoryPool.empty`."""
        dims, nbytes = extent(shape, dtype)
        return (await self.allocate(nbytes, use=use, tag=tag)).view(dtype, dims)

    def save(self, *values: object) -> None:
        """Keep values from a forward until the end of its backward, which gets them; called again, others instead.

        Raises:
            InvalidRequest: One of them has memory that the step allocated for another use.
        """
        self._memory.check_saved(values)
        self.saved = values

    def run(self, function: Callable[P, object], /, *args: P.args, **kwargs: P.kwargs) -> None:
        """Queue ``function(*args, **kwargs)`` on the host stream that this is; its error is the step's.

        Arrays over buffers may be passed. What it returns is dropped: await `context.stream.run(...)` where it matters.

        Raises:
            InvalidRequest: The stage's device is not the host.
        """
        if not isinstance(self.stream, HostStream):
            raise InvalidRequest("run()", self.stream, "a stream of the host; others take work by their own libraries")
        self.work.append(self.stream.run(_call, functools.partial(function, *args, **kwargs)))


def _call(function: Callable[[], object]) -> None:
    """Call, and drop the result. A closure would keep its arguments for as long as its error is kept."""
    function()


Forward = Callable[[Any, StepContext[Any]], Awaitable[Any]]
"""``async def forward(item, context)``: queues the work on `context.stream`, and returns the next stage's item."""

Backward = Callable[[Any, Any, StepContext[Any]], Awaitable[Any]]
"""``async def backward(gradient, saved, context)``: returns the gradient for the stage before."""


@final
class ParallelStage:
    """A part of a model: ``ParallelStage(block.forward, block.backward, saved="64 MiB", output="8 MiB")``.

    Items and gradients are buffers, arrays, or tuples, lists and dicts of them; plain values among them go along. They
    belong to the runner: a step frees neither what it is given nor what it returns. What it allocates, it frees, saves
    or returns.

    Args:
        forward: ``async def forward(item, context)``. The first stage's items are the micro-batches themselves; what
            the last one returns is a result, and its backward's gradient is None.
        backward: ``async def backward(gradient, saved, context)``. `saved` is the tuple of what the forward saved. The
            first stage's output is dropped.
        saved: The most bytes that a micro-batch's forward allocates and leaves for its backward. Its item is not
            counted: it is kept too where it was saved. An output that is saved as well is counted here, and not as
            output; except for the last stage's, which are results.
        output: The bytes of what the forward returns, which is also what its gradient has.
        working: The most bytes that a step needs besides, until it has been queued.
        name: What errors and reports call it; "stage 0" and so on without it.

    Each buffer is counted in units of 512 bytes.

    Raises:
        InvalidRequest: A size is none.
    """

    __slots__ = ("backward", "forward", "name", "output", "saved", "working")

    def __init__(
        self,
        forward: Forward,
        backward: Backward,
        *,
        saved: Size,
        output: Size,
        working: Size = 0,
        name: str | None = None,
    ) -> None:
        self.forward = forward
        self.backward = backward
        self.saved = granules(parse_size(saved, what="saved"))
        self.output = granules(parse_size(output, what="output"))
        self.working = granules(parse_size(working, what="working"))
        self.name = name

    def __repr__(self) -> str:
        sizes = f"saved {format_size(self.saved)}, output {format_size(self.output)}"
        return f"<asyncmem.ParallelStage {self.name or ''}: {sizes}, working {format_size(self.working)}>"
