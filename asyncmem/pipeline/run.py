"""One run of a pipeline over a source: its reader, the workers, the order of items, the first error, the results."""

from __future__ import annotations

import threading
import weakref
from collections.abc import AsyncIterable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Generic, Self, TypeVar, cast

import anyio

from asyncmem.errors import InvalidRequest, StageError
from asyncmem.figures import format_count
from asyncmem.pipeline.errors import clear_frames, describe_error, is_own_error
from asyncmem.pipeline.queue import ItemQueue
from asyncmem.pipeline.trees import PLAIN_TYPES, buffers_in, fence_behind, order_behind

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence
    from typing import Any

    from asyncmem.core import Buffer
    from asyncmem.devices import Fence, Stream
    from asyncmem.pipeline.shares import ActiveStage

B = TypeVar("B")


class InFlight:
    """An item under way.

    Attributes:
        number: Its number in the source.
        allowed: When it might be taken from the source: until then stages waited for room and not for it.
        value: What the last stage made of it.
        fence: Behind what the last stage's stream was given to do with it.
        stream: That stream.
    """

    __slots__ = ("allowed", "fence", "number", "stream", "value")

    def __init__(self, number: int, value: object, allowed: float) -> None:
        self.number = number
        self.allowed = allowed
        self.value = value
        self.fence: Fence | None = None
        self.stream: Stream | None = None


class Ended(Exception):
    """Nothing more comes out of a run."""


class Run:
    """Takes a source's items through the stages. Nothing of it outlives `main`.

    Every decision is made in a step without awaits; the tasks wait in queues alone. Between stages a queue has no
    bound of its own: memory holds the stages back, and `in_flight` the source.
    """

    def __init__(
        self,
        stages: Sequence[ActiveStage],
        source: Iterable[object] | AsyncIterable[object],
        *,
        ordered: bool,
        in_flight: int,
        clock: Callable[[], float],
        helpers: Sequence[Callable[[], Coroutine[Any, Any, None]]] = (),
    ) -> None:
        self._stages = stages
        self._helpers = helpers
        self._clock = clock
        self._in_flight = in_flight
        self._out: ItemQueue[InFlight] = ItemQueue()
        self._queues: list[ItemQueue[InFlight]] = []
        self._exits: list[Callable[[InFlight], None]] = []
        self._resequencers: list[Resequencer] = []
        self._tokens: dict[int, ItemQueue[None]] = {}
        following = self._out
        for at, active in reversed(list(enumerate(stages))):
            several = ordered and active.stage.workers > 1
            if several and not active.calls_plainly:
                # One worker at a time waits for an item and its memory. A later item that began before would keep what
                # the earlier one needs, and be kept itself until that one has passed.
                self._tokens[at] = ItemQueue()
                self._tokens[at].put(None)
            queue: ItemQueue[InFlight] = ItemQueue(active.plan.window) if several else ItemQueue()
            self._queues.insert(0, queue)
            if several:
                self._resequencers.append(Resequencer(queue, following))
            self._exits.insert(0, self._resequencers[-1] if several else following.put)
            following = queue
        self._reader: IterableReader | AsyncIterableReader
        if isinstance(source, AsyncIterable):
            self._reader = AsyncIterableReader(source, self._take_in, self._source_ended)
        elif isinstance(source, Iterable):
            self._reader = IterableReader(source, self._take_in, self._source_ended)
        else:
            raise InvalidRequest("source", source, "an iterable or an async iterable")
        self.handed = 0
        self._begun = 0
        self._started: float | None = None
        self._ended: float | None = None
        self._exhausted: float | None = None  # when the source had no more
        self._scope: anyio.CancelScope | None = None
        self._stopped = False
        self.error: StageError | None = None
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
            Ended: There is none; `error` says whether that is because a stage failed.

        Cancelled: the result comes next time.
        """
        item = await self._out.get()
        self.handed += 1
        if type(item.value) not in PLAIN_TYPES:
            self._results.update(buffers_in(item.value))
        self._reader.allow(self._clock())
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
                if self._stopped:
                    return
                for at, active in enumerate(self._stages):
                    for number in range(active.stage.workers):
                        tasks.start_soon(self._work, at, name=f"{active.stage.name} {number}")
                tasks.start_soon(self._reader.run, name="source")
                for helper in self._helpers:
                    tasks.start_soon(helper)
                for _ in range(self._in_flight):
                    self._reader.allow(self._started)
        finally:
            for queue in (*self._queues, self._out):
                queue.clear()
            for resequencer in self._resequencers:
                resequencer.clear()
            self._ended = self._clock()
            self._out.end(Ended)
            self.over.set()

    async def _work(self, at: int) -> None:
        active, queue, pass_on, clock = self._stages[at], self._queues[at], self._exits[at], self._clock
        share, stream = active.share, active.stream
        function = active.stage.function
        plainly = active.calls_plainly
        token = self._tokens.get(at)
        begun = _nothing if token is None else partial(token.put, None)
        idle = clock()  # since then
        while True:
            try:
                if token is not None:
                    await token.get()
                item = await queue.get()
            except BaseException:  # nothing more comes
                if self._exhausted is not None:
                    active.held_back += clock() - max(idle, self._exhausted)
                raise
            began = clock()
            active.held_back += max(0.0, item.allowed - idle)
            active.at_work += 1
            try:
                if stream is not None:
                    order_behind(item.value, None if item.stream is stream else item.fence, stream)
                if plainly:
                    item.value = await function(item.value, share)
                else:
                    item.value = await active.call(item.value, begun)
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

    # -- decisions ---------------------------------------------------------------------------------------------------

    def _take_in(self, item: object, allowed: float) -> None:
        self._queues[0].put(InFlight(self._begun, item, allowed))
        self._begun += 1

    def _source_ended(self, error: BaseException | None) -> None:
        if error is not None:
            self._fail("source", self._begun, error)
        self._exhausted = self._clock()
        self._stop_at_the_end()

    def _stop_at_the_end(self) -> None:
        if self._exhausted is not None and self.handed == self._begun:
            self.stop()

    def _fail(self, stage: str, item: int, error: BaseException) -> None:
        if self.error is None:
            self.error = StageError(stage, item, describe_error(error))
            self.error.__cause__ = error
            self.stop()


class Resequencer:
    """Lets what several workers have finished pass in the order in which they took it."""

    def __init__(self, queue: ItemQueue[InFlight], following: ItemQueue[InFlight]) -> None:
        self._queue = queue
        self._following = following
        self._next = 0
        self._early: dict[int, InFlight] = {}

    def __call__(self, item: InFlight) -> None:
        """Take a finished item, and pass on all whose turn it is."""
        self._early[item.number] = item
        while self._next in self._early:
            self._following.put(self._early.pop(self._next))
            self._next += 1
            self._queue.release()

    def clear(self) -> None:
        """Drop the items whose turn has not come."""
        self._early.clear()


def _nothing() -> None:
    """Stand for what an item without a token does when it has begun."""


class IterableReader:
    """Takes from an iterable at once, in whatever step allows it."""

    def __init__(
        self,
        source: Iterable[object],
        take_in: Callable[[object, float], None],
        end: Callable[[BaseException | None], None],
    ) -> None:
        self._items = iter(source)
        self._take_in = take_in
        self._end = end
        self._ended = False

    async def run(self) -> None:
        """Do nothing."""

    def allow(self, now: float) -> None:
        """Take the next item."""
        if self._ended:
            return
        try:
            item = next(self._items)
        except StopIteration:
            self._ended = True
            self._end(None)
        except BaseException as error:
            if not is_own_error(error):
                raise
            self._ended = True
            self._end(error)
        else:
            self._take_in(item, now)


class AsyncIterableReader:
    """Awaits the items of an async iterable, and closes it in the end."""

    def __init__(
        self,
        source: AsyncIterable[object],
        take_in: Callable[[object, float], None],
        end: Callable[[BaseException | None], None],
    ) -> None:
        self._items = aiter(source)
        self._take_in = take_in
        self._end = end
        self._allowed: ItemQueue[float] = ItemQueue()  # since when, for each item

    async def run(self) -> None:
        """Await the items."""
        try:
            while True:
                allowed = await self._allowed.get()
                try:
                    item = await anext(self._items)
                except StopAsyncIteration:
                    break
                self._take_in(item, allowed)
                del item
        except BaseException as error:
            if not is_own_error(error):
                raise
            self._end(error)
        else:
            self._end(None)
        finally:
            close = getattr(self._items, "aclose", None)
            if close is not None:
                with anyio.CancelScope(shield=True):
                    await close()

    def allow(self, now: float) -> None:
        """Let the next item be awaited."""
        self._allowed.put(now)


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
        try:
            return cast("B", await self._run.next())
        except Ended:
            error, self._run.error = self._run.error, None
        try:
            if error is not None:
                raise error
        finally:
            del error  # which would keep the frame that keeps it
        raise StopAsyncIteration

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
