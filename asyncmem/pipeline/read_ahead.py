"""Reading ahead: one thread or task reads a loader, workers copy its batches; they come out in the order of reading."""

import asyncio
import heapq
import inspect
import math
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, final

import anyio
from anyio import from_thread, lowlevel

from asyncmem.arrays import Layout
from asyncmem.core import Buffer, Ready
from asyncmem.devices import Stream
from asyncmem.pipeline.resources import BorrowedStreams
from asyncmem.pipeline.staging import HostArray, HostCopier, Workers, host_array
from asyncmem.pipeline.trees import map_leaves
from asyncmem.pool import Copy, Request
from asyncmem.pool.alarm import alarm
from asyncmem.pool.latch import Latch
from asyncmem.pool.loops import need_running_loop
from asyncmem.pool.pool import pool_of

if TYPE_CHECKING:
    from asyncmem.pipeline.prefetch import Prefetcher


@dataclass(eq=False, slots=True)
class CopyStream:
    """A stream that does nothing but copy batches, one after another, and the copies of its latest batch.

    Each batch has one to itself while it is on its way and while the next ones are: a wait for the home of a batch's
    memory then waits for that batch, and for none of those that were read ahead of it.
    """

    stream: Stream
    copies: list[Copy] = field(default_factory=list)


_TAKEN = object()  # stands for an array in a batch that is on its way


@final
class Batch:
    """One batch in the order of reading: once completed, it is there, has an error, or is the end of reading.

    Attributes:
        number: Its number.
        completed: Whether it is.
        error: What reading or copying raised.
        tree: The batch as the loader had it, with arrays of the device once it is completed.
        layout: Where the arrays lie in the buffer, one behind the other.
        stream: What copies them.
        buffer: Their memory; None at the end.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.completed: Latch[None] = Latch()
        self.error: BaseException | None = None
        self.tree: object = None
        self.layout = Layout(())
        self.stream: CopyStream | None = None
        self.buffer: Buffer | None = None
        self._sources: list[HostArray] = []

    def __lt__(self, other: "Batch") -> bool:
        return self.number < other.number

    def take_in(self, item: object) -> int:
        """Take what the loader returned, and return how many bytes its arrays need."""
        self.tree = map_leaves(item, self._take_out)
        self.layout = Layout.of(self._sources)
        return self.layout.nbytes

    def _take_out(self, leaf: object) -> object:
        source = host_array(leaf)
        if source is None:
            return leaf
        self._sources.append(source)
        return _TAKEN

    def copy(self, copier: HostCopier, workers: Workers) -> None:
        """Start copying all arrays, for which those that are not page-locked are read by the workers (blocks)."""
        stream = self.stream
        assert self.buffer is not None
        assert stream is not None
        for copy in stream.copies:
            # So a consumer that runs ahead of the device is held up. Else all that the device has not come to would be
            # kept on the host.
            copy.block()
        sources, self._sources = self._sources, []
        pieces = [(place.offset, one.data) for place, one in zip(self.layout.placements, sources, strict=True)]
        if copier.blocks(pieces):
            stream.copies = [copier.stage(self.buffer, pieces, workers)]
        else:
            stream.copies = copier.copy(self.buffer, pieces)
        for copy in stream.copies:
            if not copy.ordered:
                copy.block()
        arrays = iter(self.layout.over(self.buffer))
        self.tree = map_leaves(self.tree, lambda leaf: next(arrays) if leaf is _TAKEN else leaf)

    def complete(self, error: BaseException | None = None) -> None:
        """Set its outcome, once; with an error its memory goes back."""
        if error is not None and self.buffer is not None:
            self.buffer.free()
        self.error = error
        self.completed()

    def free(self) -> None:
        """Give the memory back, unless it is still copied to; twice is fine."""
        if self.completed.done and self.buffer is not None:
            self.buffer.free()


class ReadAhead(ABC):
    """One iteration: one thread or task reads the loader, workers copy its batches.

    The consumer grants batches, one for each that may be read ahead. They come out in the order of reading, which ends
    with one that is empty or has an error, so an error comes out behind all that was read before it.
    """

    _gate: threading.Semaphore | anyio.Semaphore  # one for each granted batch

    def __init__(self, prefetcher: "Prefetcher") -> None:
        self.workers = Workers(prefetcher.workers + 1, "asyncmem prefetch")
        self._prefetcher = prefetcher
        self._pool = pool_of(prefetcher._share)
        self._copier = HostCopier(self._pool, pinned=prefetcher._pinned, tag=prefetcher._tag)
        self._borrowed = BorrowedStreams(self._pool)
        self._streams: list[CopyStream] = []
        self._lock = threading.Lock()
        self._count = 0
        self._waiting: list[Batch] = []  # a heap: not requested yet
        self._granted: deque[Batch] = deque()  # and the reader has not read these
        self._read_out = False
        self._void_from = math.inf  # the number of the first batch that is not wanted

    def start(self) -> None:
        """Start reading."""
        for _ in range(self._prefetcher.ahead):
            self._grant()
        self.workers.submit(self._read_all)

    # -- for the consumer --------------------------------------------------------------------------------------------

    @contextmanager
    def next_batch(self) -> Iterator[Batch]:
        """Take the next batch, to be waited for and redeemed; it is the next again where the wait is cut short."""
        if not self._waiting:  # more consumers than batches ahead, or none are left
            self._grant()
        with self._lock:
            batch = heapq.heappop(self._waiting)
        try:
            yield batch
        except BaseException:
            with self._lock:
                heapq.heappush(self._waiting, batch)
            if self._is_void(batch):
                batch.free()
            raise

    def redeem(self, batch: Batch) -> bool:
        """Return whether a completed batch is there, and let one more be read; False at the end.

        Raises:
            BaseException: Reading or copying it failed with that; nothing comes after it.
        """
        if self._is_void(batch):
            batch.free()
            return False
        if batch.error is not None:
            self.stop(batch.number + 1)
            error, batch.error = batch.error, None  # or the error would keep what keeps it
            try:
                raise error
            finally:
                del error
        if batch.buffer is None:
            return False
        self._grant()
        return True

    def stop(self, number: int = 0) -> None:
        """Stop reading, and free what was read from a number on. The threads end soon. From any thread."""
        with self._lock:
            first = not self._stopped
            self._void_from = min(self._void_from, number)
            void = [batch for batch in self._waiting if self._is_void(batch)]
        if first:
            self._copier.end()
            self._interrupt()
        for batch in void:
            batch.free()

    def join(self, timeout: float) -> None:
        """Wait for the threads to end (blocks for at most `timeout` seconds), unless one of them asks."""
        if not self.workers.join(timeout):
            self._warn()

    async def join_async(self, timeout: float) -> None:
        """Wait until the threads have nothing more to do, for at most `timeout` seconds, also where it is cancelled."""
        if not self.workers.started:
            return
        with anyio.CancelScope(shield=True):
            await self.workers.ended.wait(timeout)
        if not self.workers.ended.done:
            self._warn()

    def _warn(self) -> None:
        alarm("a loader is still in a call: the thread that reads it ends after that", RuntimeWarning)

    @property
    def _stopped(self) -> bool:
        return self._void_from < math.inf

    def _is_void(self, batch: Batch) -> bool:
        return batch.number >= self._void_from

    def _grant(self) -> None:
        with self._lock:
            batch = Batch(self._count)
            self._count += 1
            heapq.heappush(self._waiting, batch)
            over = self._stopped or self._read_out
            if not over:
                self._granted.append(batch)
        if over:
            batch.complete()
        else:
            self._gate.release()

    # -- reading -----------------------------------------------------------------------------------------------------

    @abstractmethod
    def _read(self) -> None:
        """Read until `stop`, or an error: the loader's own, which may be that it has ended."""

    @abstractmethod
    def _interrupt(self) -> None:
        """End the reader's waiting."""

    def _read_all(self) -> None:
        error: BaseException | None = None
        try:
            self._read()
        except (StopIteration, StopAsyncIteration):
            pass
        except BaseException as caught:  # noqa: BLE001 -- it is raised where the batch is requested
            error = caught
        with self._lock:
            self._read_out = True
            left = list(self._granted)
            self._granted.clear()
        for batch in left:
            batch.complete(error)
            error = None
        self.workers.end()

    def _hand_on(self, buffer: Buffer) -> None:
        """Queue the copy of the batch that was read, whose memory has come."""
        with self._lock:
            batch = self._granted.popleft()
        batch.buffer = buffer
        self.workers.submit(partial(self._finish, batch))

    def _finish(self, batch: Batch) -> None:
        try:
            if not self._is_void(batch):
                batch.copy(self._copier, self.workers)
        except BaseException as error:  # noqa: BLE001 -- it is raised where the batch is requested
            batch.complete(error)
        else:
            batch.complete()
            if self._is_void(batch):
                batch.free()

    def _request(self, item: object) -> Ready[Buffer] | Request[Buffer]:
        """Start a request for the memory of what the loader returned."""
        batch, ours = self._granted[0], self._prefetcher
        # One for each batch that is ahead, for the one that is in use, and for one that is about to be dropped.
        if len(self._streams) < ours.ahead + 2:
            self._streams.append(CopyStream(self._borrowed.stream("prefetch")))
        stream = batch.stream = self._streams[batch.number % (ours.ahead + 2)]
        nbytes = batch.take_in(item)
        return ours._share.allocate_async(nbytes, stream=stream.stream, tag=ours._tag, timeout=ours._timeout)


@final
class ThreadReadAhead(ReadAhead):
    """Reads on a thread."""

    def __init__(self, prefetcher: "Prefetcher", loader: Iterable[object]) -> None:
        super().__init__(prefetcher)
        self._gate: threading.Semaphore = threading.Semaphore(0)
        self._loader = loader

    def _read(self) -> None:
        items: Iterator[object] | None = None
        try:
            while self._gate.acquire() and not self._stopped:
                if items is None:
                    items = iter(self._loader)
                self._hand_on(self._copier.wait(self._request(next(items))))
        finally:
            if inspect.isgenerator(items):
                items.close()

    def _interrupt(self) -> None:
        self._gate.release()


@final
class TaskReadAhead(ReadAhead):
    """Reads in one task of the running event loop. To be made, and asked, on that loop.

    A thread starts the task and waits for it, so that no task group stays open between two batches.
    """

    def __init__(self, prefetcher: "Prefetcher", loader: AsyncIterable[object]) -> None:
        super().__init__(prefetcher)
        self._gate: anyio.Semaphore = anyio.Semaphore(0)
        self._loader = loader
        self._loop = need_running_loop(self)
        self._token = lowlevel.current_token()
        self._scope = anyio.CancelScope()

    def _read(self) -> None:
        error = from_thread.run(self._read_in_task, token=self._token)
        try:
            if error is not None:
                raise error
        finally:
            del error  # which would keep this frame, and this frame it

    async def _read_in_task(self) -> BaseException | None:
        items: AsyncIterator[object] | None = None
        try:
            with self._scope:
                while True:
                    await self._gate.acquire()
                    if items is None:
                        await self._pool.open()
                        items = aiter(self._loader)
                    self._hand_on(await self._request(await anext(items)))
        except Exception as error:  # noqa: BLE001 -- raised by the thread that waits for the task
            return error
        except anyio.get_cancelled_exc_class():
            # The task is our own: when the loop's run ends and cancels it, nobody waits for it.
            return RuntimeError("the task that reads ahead was cancelled")
        finally:
            if inspect.isasyncgen(items):
                with anyio.CancelScope(shield=True):
                    await items.aclose()
        return None

    def _interrupt(self) -> None:
        loop = self._loop.loop
        if isinstance(loop, asyncio.AbstractEventLoop):
            # Also from its own thread: an iteration may be dropped there when the loop runs no more.
            with suppress(RuntimeError):  # it is closed, and the task has ended with it
                loop.call_soon_threadsafe(self._scope.cancel)
        else:
            self._loop.call(self._scope.cancel)
