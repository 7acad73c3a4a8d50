"""A stage of a model: what it does with a micro-batch, what memory its schedule makes of that, and where it lies."""

import functools
import weakref
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Generic, Literal, ParamSpec, TypeAlias, final, get_args

import anyio

from asyncmem.arrays import Array, extent
from asyncmem.core import Buffer
from asyncmem.devices import HostStream, Stream
from asyncmem.devices.base import StreamT_co
from asyncmem.errors import Described, InvalidRequest
from asyncmem.figures import format_size
from asyncmem.pipeline.parallel.schedule import Schedule, Step
from asyncmem.pipeline.stage import granules
from asyncmem.pipeline.trees import buffers_except, buffers_in
from asyncmem.pool import Budget, Lease
from asyncmem.text import printable, quoted
from asyncmem.units import Size, parse_size

P = ParamSpec("P")

Use: TypeAlias = Literal["saved", "output", "working"]
"""Which of the sizes that a stage states an allocation counts against."""


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

    __slots__ = ("_cleared", "_clearing", "_is_result", "_slots", "saved", "stage", "step", "stream", "work")

    def __init__(
        self, stage: str, step: Step, stream: StreamT_co, slots: "Mapping[Use, Slot]", *, is_result: bool
    ) -> None:
        """Not made by users; `is_result` says that what the step returns stays until all is done."""
        self.stage = stage
        self.step = step
        self.stream = stream
        self.saved: tuple[object, ...] = ()
        self.work: list[Awaitable[object]] = []
        self._slots = slots
        self._is_result = is_result
        self._cleared: set[Use] = set()
        self._clearing = anyio.Lock()

    def __repr__(self) -> str:
        return f"<asyncmem.StepContext: {self.step} at {quoted(self.stage)}>"

    @property
    def micro_batch(self) -> int:
        """The number of the micro-batch, counted from 0."""
        return self.step.micro_batch

    async def allocate(self, size: Size, *, use: Use = "working", tag: str | None = None) -> Buffer:
        """Wait for memory whose home is the step's stream; see `AsyncMemoryPool.allocate_async`.

        Args:
            size: Bytes.
            use: Which size that the stage states it is a part of: "saved" for what a forward saves, returned or not;
                "output" for what a step returns; "working" for what it frees.
            tag: A label for reports.

        Raises:
            InvalidRequest: It is more than the stage has left of what it stated for that use, or what is left is in
                pieces, because of what the step has freed before.
        """
        nbytes = parse_size(size)
        if use not in get_args(Use):
            raise InvalidRequest("use", use, '"saved", "output" or "working"')
        slot = self._slots[use]
        if use not in self._cleared:
            async with self._clearing:  # a step may have tasks of its own
                if use not in self._cleared:
                    await slot.clear(self.stream)
                    self._cleared.add(use)
        left, owner = format_size(slot.left), quoted(self.stage)
        if granules(nbytes) > slot.left:
            expected, hint = (
                f"at most the {left} that {owner} has left of what it states as {use}",
                f"state more as {use}",
            )
        elif nbytes and slot.has_no_gap_of(nbytes):
            expected = f"less, as the {left} of {use} that {owner} has left are in pieces"
            hint = "free first what was allocated last"
        else:
            return await slot.allocate(nbytes, self.stream, tag)
        raise InvalidRequest("size", Described(format_size(nbytes)), expected, hint=hint)

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
        self._check_uses("save()", values, "saved", but=("working",) if self._is_result else ("working", "output"))
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

    def _check_output(self, output: object, given: object) -> None:
        """Raise if an output has memory that the next steps use; a result must not use memory of the inputs either."""
        self._check_uses("output", output, "output", but=("working", "saved") if self._is_result else ("working",))
        if self._is_result and len(buffers_except(output, but=given)) < len(list(buffers_in(output))):
            got = Described(f"what {quoted(self.stage)} was given")
            raise InvalidRequest("output", got, "memory allocated as output, as it is a result")

    def _check_uses(self, what: str, values: object, use: Use, *, but: Sequence[Use]) -> None:
        for buffer in buffers_in(values):
            found = next((other for other in but if buffer in self._slots[other]), None)
            if found is not None:
                got = Described(f"{format_size(buffer.nbytes)} that {quoted(self.stage)} allocated as {found}")
                raise InvalidRequest(what, got, f"memory allocated as {use}", hint=f'allocate(size, use="{use}")')


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
        if name is not None and not isinstance(name, str):
            raise InvalidRequest("name", name, "text")
        self.name = name

    def __repr__(self) -> str:
        sizes = f"saved {format_size(self.saved)}, output {format_size(self.output)}"
        return f"<asyncmem.ParallelStage {printable(self.name or '')}: {sizes}, working {format_size(self.working)}>"


GRADIENT_SLOTS = 2
"""Gradients that a stage has room for: the current one, and one that arrives meanwhile."""

OUTPUT_SLOTS = 2
"""Outputs that a stage has room for: one that is made, and one that is copied meanwhile."""


@dataclass(frozen=True, slots=True)
class Need:
    """So many pieces of so many bytes, and what they are."""

    what: str
    count: int
    nbytes: int

    def __str__(self) -> str:
        return f"{self.count} x {format_size(self.nbytes)} {self.what}"


@dataclass(frozen=True, slots=True)
class StageNeeds:
    """The most that a stage holds at once: what its steps allocate, and what comes from its neighbours."""

    name: str
    parts: tuple[Need, ...]

    @property
    def total(self) -> int:
        """All of it, in bytes."""
        return sum(part.count * part.nbytes for part in self.parts)

    def __str__(self) -> str:
        text = " + ".join(str(part) for part in self.parts if part.count * part.nbytes)
        return f"{self.name}: {text or 'nothing'} = {format_size(self.total)}"


def needs_of(stages: Sequence[ParallelStage], names: Sequence[str], schedule: Schedule) -> list[StageNeeds]:
    """Return what each stage needs.

    A stage's input lies with it from the forward of the stage before until its own backward. The stage before begins
    no further micro-batch until the backward of its oldest, so that many inputs are there at most, and none of them
    is ever waited for. Gradients have two slots; the stage behind waits for one only until this one's backward has
    been queued, and not until it is done. The last stage sends gradients alone, because its outputs are results;
    where there is no other stage, they are dropped, and yet have a slot.
    """
    last = len(stages) - 1
    found = []
    for at, stage in enumerate(stages):
        live = schedule.live(at)
        before = stages[at - 1].output if at else 0
        output = before if 0 < at == last else max(stage.output, before)
        parts = (
            Need("saved", live, stage.saved),
            Need("working", 1, stage.working),
            Need("outputs", OUTPUT_SLOTS, output),
            Need("results", schedule.micro_batches if at == last else 0, stage.output),
            Need("inputs", schedule.live(at - 1) if at else 0, before),
            Need("gradients", min(GRADIENT_SLOTS, live) if at < last else 0, stage.output),
        )
        found.append(StageNeeds(names[at], parts))
    return found


class Slot:
    """A range of memory for one thing at a time, which may be in several buffers.

    Its next user finds it free and in one piece. So as long as none of its buffers is freed before the last one
    is allocated, they fit, whatever their sizes are.

    Attributes:
        nbytes: The length of the range.
        peak: The most bytes of it that were held.
    """

    def __init__(self, lease: Lease, nbytes: int, name: str, until: ExitStack) -> None:
        """Take the next bytes of a lease; with none there are only buffers of no bytes."""
        self.nbytes = nbytes
        self.peak = 0
        self._range = until.enter_context(lease.lease(nbytes)) if nbytes else lease
        self._share = Budget(self._range, name, nbytes, waits=True)
        self._given: weakref.WeakSet[Buffer] = weakref.WeakSet()

    def __contains__(self, buffer: Buffer) -> bool:
        return buffer in self._given

    @property
    def left(self) -> int:
        """The bytes that no buffer holds; they may come late, as where numpy's work still has freed memory."""
        return self.nbytes - sum(granules(one.nbytes) for one in self._given if one.alive)

    async def clear(self, stream: Stream) -> None:
        """Wait until all of it is free, and let a stream come behind all that was done with it.

        Raises:
            DeviceError: The device would not order the stream.
        """
        whole = self._share.try_allocate(self.nbytes, stream=stream)
        if whole is None:
            if self._share.stats().allocated_bytes == 0:
                # All of it is free. A request would wait for ever for a device that fails; the device itself says why.
                stream.wait(stream.record())
            whole = await self._share.allocate_async(self.nbytes, stream=stream)
        whole.free()

    async def allocate(self, nbytes: int, stream: Stream, tag: str | None = None) -> Buffer:
        """Wait for memory whose home is a stream."""
        buffer = await self._share.allocate_async(nbytes, stream=stream, tag=tag)
        self._given.add(buffer)
        self.peak = max(self.peak, self.nbytes - self.left)
        return buffer

    def has_no_gap_of(self, nbytes: int) -> bool:
        """Whether what is held leaves no piece of that length, and none is coming."""
        coming = self._share.stats().allocated_bytes - (self.nbytes - self.left)
        return not coming and self._range.largest_hole() < granules(nbytes)
