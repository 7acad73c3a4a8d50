"""One run of a pipeline over a source: what it reads, the workers, the order of items, the first error, the results."""

import math
import threading
import weakref
from collections.abc import AsyncIterable, AsyncIterator, Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import InitVar, dataclass
from typing import Any, Generic, Self, TypeVar, cast

import anyio
from anyio.abc import TaskGroup

from asyncmem.core import Buffer
from asyncmem.devices import Fence, Stream
from asyncmem.errors import InvalidRequest, StageError
from asyncmem.figures import format_count
from asyncmem.pipeline.report import StageReport
from asyncmem.pipeline.stage import AnyStage, StageBudget, StageLease, StagePlan
from asyncmem.pipeline.tasks import ItemQueue, clear_frames, describe_error, is_own_error, within
from asyncmem.pipeline.trees import PLAIN_TYPES, buffers_in, fence_behind, order_behind
from asyncmem.pool.loops import need_running_loop

B = TypeVar("B")


class RemoteError(Exception):
    """What a stage has failed with that runs elsewhere: the error to raise for it, but for the item's number."""

    def __init__(self, kind: type[StageError], stage: str, reason: str, cause: BaseException | None) -> None:
        """Take the kind of error, the stage's name, what went wrong, and what the stage raised where that is known."""
        super().__init__(reason)
        self.kind, self.stage, self.reason, self.cause = kind, stage, reason, cause


@dataclass(slots=True, eq=False)
class ActiveStage:
    """A stage of an open pipeline: what its workers have in common.

    Attributes:
        stage: The stage.
        plan: Its part of the plan.
        share: What it allocates from, or what the lease of each item comes from.
        items: Items finished.
        at_work: How many of its workers have an item now.
        inside: Seconds that its workers spent inside its function, on items that are finished.
        held_back: Seconds that they had no item because no more might be under way, or the source had no more.
    """

    stage: AnyStage
    plan: StagePlan
    share: StageBudget
    items: int = 0
    at_work: int = 0
    inside: float = 0.0
    held_back: float = 0.0

    @property
    def calls_plainly(self) -> bool:
        """Whether an item takes nothing but the call of the stage's function with the share."""
        return self.stage.timeout is None and not self.stage.credit

    async def call(self, item: object, begun: Callable[[], None]) -> object:
        """Call the stage's function, in a lease for the item and under its time limit, where it has them.

        Args:
            item: What the function is called with.
            begun: Called once the item has its lease.

        Raises:
            TimeoutError: It took longer, and was cancelled. What it waited for the lease does not count.
        """
        credit, stream = self.stage.credit, self.share.stream
        async with StageLease(self.share, credit, stream=stream) if credit else nullcontext(self.share) as share:
            share.stream = stream
            begun()
            return await within(self.stage.timeout, self.stage.function(item, share))

    def report(self, seconds: float) -> StageReport:
        """Return its figures for a pipeline that ran for so many seconds."""
        stats = self.share.stats()
        whole = max(seconds * self.stage.workers, 1e-12)
        inside = min(self.inside / whole, 1.0)
        waiting = min(stats.wait_seconds / whole, inside)
        held_back = min(self.held_back / whole, 1.0 - inside)
        return StageReport(
            name=self.stage.name,
            workers=self.stage.workers,
            items=self.items,
            items_per_s=self.items / seconds if seconds else 0.0,
            busy=inside - waiting,
            waiting_for_memory=waiting,
            waiting_for_input=1.0 - inside - held_back,
            held_back=held_back,
            peak_bytes=stats.peak_allocated,
            kept_bytes=self.plan.kept,
        )


@dataclass(slots=True, eq=False)
class InFlight:
    """An item under way.

    Attributes:
        number: Its number in the source.
        value: What the last stage made of it.
        allowed: When it might be taken from the source: until then stages waited for room and not for it.
        stream: The last stage's stream.
        fence: Behind what that stream was given to do with it.
    """

    number: int
    value: object
    allowed: float
    stream: Stream | None = None
    fence: Fence | None = None


class Lane:
    """The way of items through a stage in one run.

    Attributes:
        active: The stage.
        queue: The items that wait for it.
        pass_on: Takes a finished item. Of several workers, what they have finished goes on in the order in which they
            took it, unless any order will do.
        turn: Has a token for the worker that may wait for an item and its memory; None where all may. A later item that
            began before would keep what the earlier one needs, and be kept itself until that one has passed.
    """

    def __init__(self, active: ActiveStage, following: ItemQueue[InFlight], *, ordered: bool) -> None:
        several = ordered and active.stage.workers > 1
        self.active = active
        self.queue: ItemQueue[InFlight] = ItemQueue(active.plan.window if several else math.inf)
        self.pass_on = self._pass_in_order if several else following.put
        self.turn: ItemQueue[None] | None = None
        if several and not active.calls_plainly:
            self.turn = ItemQueue()
            self.end_turn()
        self._following = following
        self._next = 0
        self._early: dict[int, InFlight] = {}

    def end_turn(self) -> None:
        """Wake the next worker, to wait for an item."""
        if self.turn is not None:
            self.turn.put(None)

    def clear(self) -> None:
        """Drop all items."""
        self.queue.clear()
        self._early.clear()

    def _pass_in_order(self, item: InFlight) -> None:
        self._early[item.number] = item
        while self._next in self._early:
            self._following.put(self._early.pop(self._next))
            self._next += 1
            self.queue.release()


@dataclass(eq=False)
class Run:
    """Takes a source's items through the stages. Nothing of it outlives `main`.

    Every decision is made in a step without awaits; the tasks wait in queues alone. Between stages a queue has no
    bound of its own: memory holds the stages back, and `in_flight` the source.

    Raises:
        InvalidRequest: The source cannot be iterated over.
    """

    stages: Sequence[ActiveStage]
    source: InitVar[Iterable[object] | AsyncIterable[object]]
    ordered: bool
    in_flight: int
    helpers: Sequence[Callable[[], Coroutine[Any, Any, None]]] = ()

    def __post_init__(self, source: Iterable[object] | AsyncIterable[object]) -> None:
        self._clock = need_running_loop("a pipeline").now
        self._out: ItemQueue[InFlight] = ItemQueue()
        self._lanes: list[Lane] = []  # the last first
        self._in = self._out
        for active in reversed(self.stages):
            self._lanes.append(Lane(active, self._in, ordered=self.ordered))
            self._in = self._lanes[-1].queue
        self._items: Iterator[object] = iter(())
        self._awaited: AsyncIterator[object] | None = None
        self._allowed: ItemQueue[float] = ItemQueue()  # since when, for each item that may be awaited
        if isinstance(source, AsyncIterable):
            self._awaited = aiter(source)
        elif isinstance(source, Iterable):
            self._items = iter(source)
        else:
            raise InvalidRequest("source", source, "an iterable or an async iterable")
        self.handed = 0
        self._begun = 0
        self._started: float | None = None
        self._ended: float | None = None
        self._exhausted: float | None = None  # when the source had no more
        self._scope: anyio.CancelScope | None = None
        self._stopped = False
        self._error: StageError | None = None
        self.over = anyio.Event()
        self._results: weakref.WeakSet[Buffer] = weakref.WeakSet()

    @property
    def seconds(self) -> float:
        """How long it has run, or ran."""
        if self._started is None:
            return 0.0
        return (self._clock() if self._ended is None else self._ended) - self._started

    @property
    def consumer_waits(self) -> bool:
        """Whether a consumer waits for a result, and none holds a result."""
        return self._out.getters > 0 and not any(buffer.alive for buffer in self._results)

    # -- for the consumer -------------------------------------------------------------------------------------------

    async def next(self) -> object:
        """Wait for the next result.

        Raises:
            StageError: A stage or the source failed; once.
            StopAsyncIteration: There is no more.

        Cancelled: the result comes next time.
        """
        item = await self._out.get()
        self.handed += 1
        if type(item.value) not in PLAIN_TYPES:
            self._results.update(buffers_in(item.value))
        self._allow(self._clock())
        self._stop_at_the_end()
        return item.value

    def stop(self) -> None:
        """Cancel what is under way and drop what waits; `main` ends soon."""
        self._stopped = True
        if self._scope is not None:
            self._scope.cancel()

    # -- the work ----------------------------------------------------------------------------------------------------

    async def main(self) -> None:
        """Run all workers until nothing is left to do, one of them fails, or `stop`."""
        self._started = self._clock()
        try:
            async with anyio.create_task_group() as tasks:
                self._scope = tasks.cancel_scope
                if not self._stopped:
                    self._start(tasks, self._started)
        finally:
            for lane in self._lanes:
                lane.clear()
            self._out.clear()
            self._ended = self._clock()
            self._out.end(self._ending)
            self.over.set()

    def _start(self, tasks: TaskGroup, now: float) -> None:
        for lane in reversed(self._lanes):
            for number in range(lane.active.stage.workers):
                tasks.start_soon(self._work, lane, name=f"{lane.active.stage.name} {number}")
        if self._awaited is not None:
            tasks.start_soon(self._await_items, self._awaited, name="source")
        for helper in self.helpers:
            tasks.start_soon(helper)
        for _ in range(self.in_flight):
            self._allow(now)

    async def _work(self, lane: Lane) -> None:
        active, queue, turn, pass_on, clock = lane.active, lane.queue, lane.turn, lane.pass_on, self._clock
        share, stream, function = active.share, active.share.stream, active.stage.function
        plainly = active.calls_plainly
        idle = clock()  # since then
        while True:
            try:
                if turn is not None:
                    await turn.get()
                item = await queue.get()
            except BaseException:  # nothing more comes
                if self._exhausted is not None:
                    active.held_back += clock() - max(idle, self._exhausted)
                raise
            began = clock()
            active.held_back += item.allowed - idle if item.allowed > idle else 0.0
            active.at_work += 1
            try:
                if stream is not None:
                    order_behind(item.value, None if item.stream is stream else item.fence, stream)
                if plainly:
                    item.value = await function(item.value, share)
                else:
                    item.value = await active.call(item.value, lane.end_turn)
                if stream is not None:
                    item.stream, item.fence = stream, fence_behind(item.value, stream)
            except BaseException as error:
                number = item.number
                del item
                clear_frames(error)
                if not is_own_error(error):
                    raise
                self._fail(active.stage.name, number, error)
                return
            finally:
                active.at_work -= 1
            idle = clock()
            active.inside += idle - began
            active.items += 1
            pass_on(item)
            del item  # or its memory would stay until the next item comes

    # -- the source ----------------------------------------------------------------------------------------------------

    def _allow(self, now: float) -> None:
        """Let one more item be taken: at once, in whatever step this is, unless it has to be awaited."""
        if self._awaited is not None:
            self._allowed.put(now)
        elif self._exhausted is None:
            try:
                item = next(self._items)
            except BaseException as error:
                if not self._source_ended(error):
                    raise
            else:
                self._take_in(item, now)

    async def _await_items(self, items: AsyncIterator[object]) -> None:
        try:
            while True:
                allowed = await self._allowed.get()
                self._take_in(await anext(items), allowed)
        except BaseException as error:
            if not self._source_ended(error):
                raise
        finally:
            close = getattr(items, "aclose", None)
            if close is not None:
                with anyio.CancelScope(shield=True):
                    await close()

    def _take_in(self, item: object, allowed: float) -> None:
        self._in.put(InFlight(self._begun, item, allowed))
        self._begun += 1

    def _source_ended(self, error: BaseException) -> bool:
        """Note the end of the source, or its error; return False for one that is not its own, as a cancellation is."""
        if not isinstance(error, StopIteration if self._awaited is None else StopAsyncIteration):
            if not is_own_error(error):
                return False
            self._fail("source", self._begun, error)
        self._exhausted = self._clock()
        self._stop_at_the_end()
        return True

    # -- the end -------------------------------------------------------------------------------------------------------

    def _stop_at_the_end(self) -> None:
        if self._exhausted is not None and self.handed == self._begun:
            self.stop()

    def _fail(self, stage: str, item: int, error: BaseException) -> None:
        if self._error is None:
            if isinstance(error, RemoteError):
                self._error = error.kind(error.stage, item, error.reason)
                self._error.__cause__ = error.cause
            else:
                self._error = StageError(stage, item, describe_error(error))
                self._error.__cause__ = error
            self.stop()

    def _ending(self) -> Exception:
        error, self._error = self._error, None
        return error or StopAsyncIteration()


class Results(Generic[B]):
    """The results of `Pipeline.map`, for ``async for``. Nothing runs before the first is asked for.

    Leaving the loop early ends the run: at once by `aclose` or at the end of an ``async with`` block over it, soon
    after the iterator is dropped, and with the pipeline's own block in any case.
    """

    _thread = 0  # of no thread: it was never made

    def __init__(self, run: Run, start: Callable[[Run], None]) -> None:
        """Not made by users; see `Pipeline.map`."""
        self._run = run
        self._start: Callable[[Run], None] | None = start
        self._thread = threading.get_ident()

    def __repr__(self) -> str:
        state = "not begun" if self._start is not None else "over" if self._run.over.is_set() else "under way"
        return f"<asyncmem.Results: {state}, {format_count(self._run.handed, 'item')} handed out>"

    def __aiter__(self) -> Self:
        """Iterate over the results."""
        return self

    async def __anext__(self) -> B:
        """Wait for the next result.

        Raises:
            StageError: A stage or the source failed; all the rest has ended, and its memory is free. Raised once.
            StopAsyncIteration: Everything has been handed out.

        Cancelled: the result comes next time.
        """
        if self._start is not None:
            self._start(self._run)
            self._start = None
        return cast("B", await self._run.next())

    async def aclose(self) -> None:
        """End the run, and wait until nothing of it is left."""
        if self._start is None:
            self._run.stop()
            await self._run.over.wait()

    async def __aenter__(self) -> Self:
        """Return the iterator itself."""
        return self

    async def __aexit__(self, *_: object) -> None:
        """End the run."""
        await self.aclose()

    def __del__(self) -> None:
        # The workers know the run and not this, so that a loop that is left drops the last reference to it.
        # Collected on another thread, it leaves the end to the pipeline's block.
        if threading.get_ident() == self._thread and self._start is None and not self._run.over.is_set():
            self._run.stop()
