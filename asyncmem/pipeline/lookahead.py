"""Reading ahead: one thread or task reads, others finish what was read, and all comes out in the order of reading.

Whoever consumes grants tickets, one for each item that may be read ahead. Reading ends with a ticket that says that
there is no more, or what went wrong, so an error comes out behind all that was read before it.
"""

from __future__ import annotations

import asyncio
import heapq
import math
import threading
from abc import ABC, abstractmethod
from collections import deque
from contextlib import closing, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar, final

import anyio
from anyio import from_thread, lowlevel

from asyncmem.pipeline.crew import Crew
from asyncmem.pool.alarm import alarm
from asyncmem.pool.latch import Latch
from asyncmem.pool.loops import running_loop

if TYPE_CHECKING:
    from collections.abc import Callable


class Load(Protocol):
    """What was read, on its way to whoever asks for it."""

    def finish(self, crew: Crew) -> None:
        """Do what a worker does (blocks), sharing with the others what comes in parts."""

    def free(self) -> None:
        """Let go of it, because nobody will ask for it; twice is fine."""


L = TypeVar("L", bound=Load)
L_co = TypeVar("L_co", bound=Load, covariant=True)


class Source(Protocol[L_co]):
    """Where items come from; read and closed on one thread."""

    def read(self, number: int) -> L_co:
        """Read the item of a number (blocks); raises `StopIteration` where there is none."""

    def close(self) -> None:
        """Let go of what is read."""

    def give_up(self) -> None:
        """End what `read` and the workers wait for of this library's. From any thread."""


class AsyncSource(Protocol[L_co]):
    """Where items come from; read and closed in one task."""

    async def read(self, number: int) -> L_co:
        """Read the item of a number; raises `StopAsyncIteration` where there is none."""

    async def close(self) -> None:
        """Let go of what is read."""

    def give_up(self) -> None:
        """End what the workers wait for of this library's. From any thread."""


@final
@dataclass(order=True, slots=True)
class Ticket(Generic[L]):
    """The place of one item in the order of reading; once settled, with what was read, an error, or neither."""

    number: int
    settled: Latch[None] = field(default_factory=lambda: Latch(_nothing), compare=False)
    load: L | None = field(default=None, compare=False)
    error: BaseException | None = field(default=None, compare=False)

    def settle(self, load: L | None = None, error: BaseException | None = None) -> None:
        """Say what became of the item, once; neither where there is none."""
        self.load, self.error = load, error
        self.settled()

    def free(self) -> None:
        """Let go of what it holds."""
        if self.load is not None:
            self.load.free()


class Lookahead(ABC, Generic[L]):
    """Reads up to `ahead` items before they are asked for.

    Args:
        ahead: The most items that are read and not asked for.
        workers: How many threads finish items: several at the same time, or one together.
        name: What the threads are called.
    """

    def __init__(self, *, ahead: int, workers: int, name: str) -> None:
        self._ended: Latch[None] = Latch(_nothing)
        self._ahead = ahead
        self._lock = threading.Lock()
        self._count = 0
        self._waiting: list[Ticket[L]] = []  # a heap: nobody has asked for these yet
        self._granted: deque[Ticket[L]] = deque()  # and the reader has not begun with these
        self._stopped = self._read_out = False
        self._void_from: float = math.inf
        self._crew = Crew(workers)
        calls = [(self._read_all, f"{name} reads")]
        calls += [(self._crew.work, f"{name} stages {number}") for number in range(1, workers + 1)]
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

    # -- for whoever consumes ----------------------------------------------------------------------------------------

    def take(self) -> Ticket[L]:
        """Answer the next ticket, to be waited for and redeemed, or put back."""
        if not self._waiting:  # more consumers than items ahead, or none are left
            self._grant()
        with self._lock:
            return heapq.heappop(self._waiting)

    def put_back(self, ticket: Ticket[L]) -> None:
        """Return a ticket that was not waited for to the end: it is the next again."""
        with self._lock:
            heapq.heappush(self._waiting, ticket)
        if self._is_void(ticket):
            ticket.free()

    def redeem(self, ticket: Ticket[L]) -> L | None:
        """Answer what a settled ticket stands for, and let one more item be read; None at the end.

        Raises:
            BaseException: Reading or finishing it failed with that; nothing comes after it.
        """
        if self._is_void(ticket):
            ticket.free()
            return None
        if ticket.error is not None:
            self.stop(ticket.number + 1)
            raise ticket.error
        if ticket.load is not None:
            self._grant()
        return ticket.load

    def stop(self, number: int = 0) -> None:
        """Read no more, and let go of what was read from a number on. The threads end soon. From any thread."""
        with self._lock:
            first, self._stopped = not self._stopped, True
            self._void_from = min(self._void_from, number)
            void = [ticket for ticket in self._waiting if self._is_void(ticket)]
        if first:
            self._interrupt()
        for ticket in void:
            ticket.free()

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

    def _is_void(self, ticket: Ticket[L]) -> bool:
        return ticket.number >= self._void_from

    # -- reading -----------------------------------------------------------------------------------------------------

    @abstractmethod
    def _read(self) -> None:
        """Read until the end, an error, or `stop`."""

    @abstractmethod
    def _signal(self) -> None:
        """Let the reader know of a ticket that was granted."""

    @abstractmethod
    def _interrupt(self) -> None:
        """End the reader's waiting."""

    def _grant(self) -> None:
        with self._lock:
            ticket: Ticket[L] = Ticket(self._count)
            self._count += 1
            heapq.heappush(self._waiting, ticket)
            over = self._stopped or self._read_out
            if not over:
                self._granted.append(ticket)
        if over:
            ticket.settle()
        else:
            self._signal()

    def _next(self) -> Ticket[L] | None:
        with self._lock:
            return None if self._stopped else self._granted.popleft()

    def _hand_on(self, ticket: Ticket[L], load: L) -> None:
        self._crew.submit(partial(self._finish, ticket, load))

    def _read_all(self) -> None:
        error: BaseException | None = None
        try:
            self._read()
        except BaseException as caught:  # noqa: BLE001 -- its loop has ended, say: whoever still waits hears of it
            error = caught
        with self._lock:
            self._read_out = True
            left = list(self._granted)
            self._granted.clear()
        for ticket in left:
            ticket.settle(error=error)
        self._crew.end()

    def _finish(self, ticket: Ticket[L], load: L) -> None:
        try:
            if not self._is_void(ticket):
                load.finish(self._crew)
        except BaseException as error:  # noqa: BLE001 -- it belongs to whoever asks for the item
            load.free()
            ticket.settle(error=error)
        else:
            ticket.settle(load)
            if self._is_void(ticket):
                load.free()

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
class ThreadLookahead(Lookahead[L]):
    """Reads on a thread."""

    def __init__(self, source: Source[L], *, ahead: int, workers: int, name: str) -> None:
        super().__init__(ahead=ahead, workers=workers, name=name)
        self._source = source
        self._gate = threading.Semaphore(0)

    def _read(self) -> None:
        with closing(self._source):
            while True:
                self._gate.acquire()
                ticket = self._next()
                if ticket is None:
                    return
                try:
                    self._hand_on(ticket, self._source.read(ticket.number))
                except StopIteration:
                    ticket.settle()
                    return
                except BaseException as error:  # noqa: BLE001 -- it belongs to whoever asks for the item
                    ticket.settle(error=error)
                    return

    def _signal(self) -> None:
        self._gate.release()

    def _interrupt(self) -> None:
        self._source.give_up()
        self._gate.release()


@final
class LoopLookahead(Lookahead[L]):
    """Reads in one task of the running event loop. To be made, and asked, on that loop.

    A thread starts the task and waits for it, so that nobody has to keep a task group open between two items.
    """

    def __init__(self, source: AsyncSource[L], *, ahead: int, workers: int, name: str) -> None:
        super().__init__(ahead=ahead, workers=workers, name=name)
        self._source = source
        loop = running_loop()
        assert loop is not None
        self._loop = loop
        self._token = lowlevel.current_token()
        self._gate = anyio.Semaphore(0)
        self._scope = anyio.CancelScope()

    def _read(self) -> None:
        from_thread.run(self._read_in_task, token=self._token)

    async def _read_in_task(self) -> None:
        # The task is nobody's but ours: when the loop's run ends and cancels it, there is nobody to be told.
        with suppress(asyncio.CancelledError):
            try:
                with self._scope:
                    while await self._read_one():
                        pass
            finally:
                with anyio.CancelScope(shield=True):
                    await self._source.close()

    async def _read_one(self) -> bool:
        await self._gate.acquire()
        ticket = self._next()
        if ticket is None:
            return False
        try:
            self._hand_on(ticket, await self._source.read(ticket.number))
        except StopAsyncIteration:
            ticket.settle()
        except Exception as error:  # noqa: BLE001 -- it belongs to whoever asks for the item
            ticket.settle(error=error)
        except BaseException:
            ticket.settle(error=None if self._stopped else RuntimeError("the task that reads ahead was cancelled"))
            raise
        else:
            return True
        return False

    def _signal(self) -> None:
        self._gate.release()

    def _interrupt(self) -> None:
        self._source.give_up()
        loop = self._loop.loop
        if isinstance(loop, asyncio.AbstractEventLoop):
            # Also from its own thread: a pass may be dropped there when the loop runs no more.
            with suppress(RuntimeError):  # it is closed, and the task has ended with it
                loop.call_soon_threadsafe(self._scope.cancel)
        else:
            self._loop.call(self._scope.cancel)


def _nothing() -> None:
    """Stand for a call whose end alone matters."""
