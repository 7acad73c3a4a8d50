"""Reading ahead: one thread or task reads a loader, workers finish its batches; they come out in the order of reading.

The consumer grants pending batches, one for each that may be read ahead. Reading ends with one that is empty or has an
error, so an error comes out behind all that was read before it.
"""

from __future__ import annotations

import asyncio
import heapq
import inspect
import math
import threading
from abc import ABC, abstractmethod
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, final

import anyio
from anyio import from_thread, lowlevel

from asyncmem.pipeline.resources import Workers
from asyncmem.pool.alarm import alarm
from asyncmem.pool.latch import Latch
from asyncmem.pool.loops import running_loop

if TYPE_CHECKING:
    from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Iterator

    from asyncmem.pipeline.staging import StagedBatch, Staging


@final
@dataclass(order=True, slots=True)
class PendingBatch:
    """One item in the order of reading; once completed, with what was read, an error, or neither."""

    number: int
    completed: Latch[None] = field(default_factory=Latch, compare=False)
    batch: StagedBatch | None = field(default=None, compare=False)
    error: BaseException | None = field(default=None, compare=False)

    def complete(self, batch: StagedBatch | None = None, error: BaseException | None = None) -> None:
        """Set the item's outcome, once; neither where there is none."""
        self.batch, self.error = batch, error
        self.completed()

    def free(self) -> None:
        """Let go of what it holds."""
        if self.batch is not None:
            self.batch.free()


class ReadAhead(ABC):
    """Reads up to `ahead` items before they are asked for.

    Args:
        ahead: The most items that are read and not asked for.
        workers: How many threads finish items: several at the same time, or one together.
        name: What the threads are called.
    """

    def __init__(self, *, ahead: int, workers: int, name: str) -> None:
        self._ended: Latch[None] = Latch()
        self._ahead = ahead
        self._lock = threading.Lock()
        self._count = 0
        self._waiting: list[PendingBatch] = []  # a heap: not requested yet
        self._granted: deque[PendingBatch] = deque()  # and the reader has not begun with these
        self._stopped = self._read_out = False
        self._void_from: float = math.inf
        self._workers = Workers(workers)
        calls = [(self._read_all, f"{name} reads")]
        calls += [(self._workers.work, f"{name} stages {number}") for number in range(1, workers + 1)]
        self._threads = [
            threading.Thread(target=self._run, args=(call,), name=called, daemon=True) for call, called in calls
        ]
        self._running = len(calls)

    def start(self) -> None:
        """Start reading."""
        for _ in range(self._ahead):
            self._grant()
        for thread in self._threads:
            thread.start()

    # -- for the consumer --------------------------------------------------------------------------------------------

    def take(self) -> PendingBatch:
        """Return the next batch, to be waited for and redeemed, or put back."""
        if not self._waiting:  # more consumers than items ahead, or none are left
            self._grant()
        with self._lock:
            return heapq.heappop(self._waiting)

    def put_back(self, pending: PendingBatch) -> None:
        """Return a pending batch that was not waited for to the end: it is the next again."""
        with self._lock:
            heapq.heappush(self._waiting, pending)
        if self._is_void(pending):
            pending.free()

    def redeem(self, pending: PendingBatch) -> StagedBatch | None:
        """Return what a completed batch stands for, and let one more item be read; None at the end.

        Raises:
            BaseException: Reading or finishing it failed with that; nothing comes after it.
        """
        if self._is_void(pending):
            pending.free()
            return None
        if pending.error is not None:
            self.stop(pending.number + 1)
            raise pending.error
        if pending.batch is not None:
            self._grant()
        return pending.batch

    def stop(self, number: int = 0) -> None:
        """Read no more, and let go of what was read from a number on. The threads end soon. From any thread."""
        with self._lock:
            first, self._stopped = not self._stopped, True
            self._void_from = min(self._void_from, number)
            void = [pending for pending in self._waiting if self._is_void(pending)]
        if first:
            self._interrupt()
        for pending in void:
            pending.free()

    @property
    def ended(self) -> bool:
        """Whether all threads have nothing more to do."""
        return self._ended.done

    def join(self, timeout: float) -> None:
        """Wait for the threads to end (blocks for at most `timeout` seconds), unless one of them asks."""
        if threading.current_thread() not in self._threads:
            self._ended.block(timeout)
            if self._told_in_time():
                for thread in self._threads:
                    thread.join()

    async def join_async(self, timeout: float) -> None:
        """Wait until the threads have nothing more to do, for at most `timeout` seconds, also where it is cancelled."""
        with anyio.CancelScope(shield=True):
            await self._ended.wait(timeout)
        self._told_in_time()

    def _told_in_time(self) -> bool:
        if not self.ended:
            alarm("a loader is still in a call: the thread that reads it ends after that", RuntimeWarning)
        return self.ended

    def _is_void(self, pending: PendingBatch) -> bool:
        return pending.number >= self._void_from

    # -- reading -----------------------------------------------------------------------------------------------------

    @abstractmethod
    def _read(self) -> None:
        """Read until the end, an error, or `stop`."""

    @abstractmethod
    def _signal(self) -> None:
        """Let the reader know of a pending batch that was granted."""

    @abstractmethod
    def _interrupt(self) -> None:
        """End the reader's waiting."""

    def _grant(self) -> None:
        with self._lock:
            pending: PendingBatch = PendingBatch(self._count)
            self._count += 1
            heapq.heappush(self._waiting, pending)
            over = self._stopped or self._read_out
            if not over:
                self._granted.append(pending)
        if over:
            pending.complete()
        else:
            self._signal()

    def _next(self) -> PendingBatch | None:
        with self._lock:
            return None if self._stopped else self._granted.popleft()

    def _hand_on(self, pending: PendingBatch, batch: StagedBatch) -> None:
        self._workers.submit(partial(self._finish, pending, batch))

    def _read_all(self) -> None:
        error: BaseException | None = None
        try:
            self._read()
        except BaseException as caught:  # noqa: BLE001 -- its loop has ended, say: a waiting consumer gets the error
            error = caught
        with self._lock:
            self._read_out = True
            left = list(self._granted)
            self._granted.clear()
        for pending in left:
            pending.complete(error=error)
        self._workers.end()

    def _finish(self, pending: PendingBatch, batch: StagedBatch) -> None:
        try:
            if not self._is_void(pending):
                batch.finish(self._workers)
        except BaseException as error:  # noqa: BLE001 -- it is raised where the item is requested
            batch.free()
            pending.complete(error=error)
        else:
            pending.complete(batch)
            if self._is_void(pending):
                batch.free()

    def _run(self, call: Callable[[], None]) -> None:
        try:
            call()
        finally:
            with self._lock:
                self._running -= 1
                last = not self._running
            if last:
                self._ended()


@final
class ThreadReadAhead(ReadAhead):
    """Reads on a thread."""

    def __init__(self, loader: Iterable[object], staging: Staging, *, ahead: int, workers: int, name: str) -> None:
        super().__init__(ahead=ahead, workers=workers, name=name)
        self._loader = loader
        self._staging = staging
        self._gate = threading.Semaphore(0)

    def _read(self) -> None:
        items: Iterator[object] | None = None
        try:
            while True:
                self._gate.acquire()
                pending = self._next()
                if pending is None:
                    return
                try:
                    if items is None:
                        items = iter(self._loader)
                    self._hand_on(pending, self._staging.begin(next(items), pending.number))
                except StopIteration:
                    pending.complete()
                    return
                except BaseException as error:  # noqa: BLE001 -- it is raised where the item is requested
                    pending.complete(error=error)
                    return
        finally:
            if inspect.isgenerator(items):
                items.close()

    def _signal(self) -> None:
        self._gate.release()

    def _interrupt(self) -> None:
        self._staging.requests.end()
        self._gate.release()


@final
class TaskReadAhead(ReadAhead):
    """Reads in one task of the running event loop. To be made, and asked, on that loop.

    A thread starts the task and waits for it, so that no task group stays open between two items.
    """

    def __init__(self, loader: AsyncIterable[object], staging: Staging, *, ahead: int, workers: int, name: str) -> None:
        super().__init__(ahead=ahead, workers=workers, name=name)
        self._loader = loader
        self._staging = staging
        self._items: AsyncIterator[object] | None = None
        loop = running_loop()
        assert loop is not None
        self._loop = loop
        self._token = lowlevel.current_token()
        self._gate = anyio.Semaphore(0)
        self._scope = anyio.CancelScope()

    def _read(self) -> None:
        from_thread.run(self._read_in_task, token=self._token)

    async def _read_in_task(self) -> None:
        # The task is our own: when the loop's run ends and cancels it, nothing has to be told.
        with suppress(asyncio.CancelledError):
            try:
                with self._scope:
                    while await self._read_one():
                        pass
            finally:
                items, self._items = self._items, None
                if inspect.isasyncgen(items):
                    with anyio.CancelScope(shield=True):
                        await items.aclose()

    async def _read_one(self) -> bool:
        await self._gate.acquire()
        pending = self._next()
        if pending is None:
            return False
        try:
            if self._items is None:
                await self._staging.pool.open()
                self._items = aiter(self._loader)
            self._hand_on(pending, await self._staging.begin_async(await anext(self._items), pending.number))
        except StopAsyncIteration:
            pending.complete()
        except Exception as error:  # noqa: BLE001 -- it is raised where the item is requested
            pending.complete(error=error)
        except BaseException:
            pending.complete(error=None if self._stopped else RuntimeError("the task that reads ahead was cancelled"))
            raise
        else:
            return True
        return False

    def _signal(self) -> None:
        self._gate.release()

    def _interrupt(self) -> None:
        self._staging.requests.end()
        loop = self._loop.loop
        if isinstance(loop, asyncio.AbstractEventLoop):
            # Also from its own thread: an iteration may be dropped there when the loop runs no more.
            with suppress(RuntimeError):  # it is closed, and the task has ended with it
                loop.call_soon_threadsafe(self._scope.cancel)
        else:
            self._loop.call(self._scope.cancel)
