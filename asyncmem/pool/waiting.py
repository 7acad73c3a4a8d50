"""One request from the moment it is asked to its end: what it wants, where it stands, who sleeps on it.

The pool works on `Waiting`; the user holds a `Request`, which lets go of it. So a request that is dropped can be told
from one that still matters.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from asyncmem.engine.admit import Waiter

if TYPE_CHECKING:
    from collections.abc import Callable

    from asyncmem.core import Batch, Buffer
    from asyncmem.pool.holdings import Owner
    from asyncmem.pool.home import Home, Sleeper
    from asyncmem.pool.share import Budget, Share
    from asyncmem.pool.turn import Turn

GRANULE = 512  # the heap's unit


@dataclass(frozen=True, slots=True)
class Ask:
    """What a call asked for, after its arguments were checked.

    Attributes:
        sizes: Bytes of each buffer, as asked.
        batch: Whether the answer is a `Batch`, also for one size.
        stream: The core's index of the stream.
        tag: The user's label.
        priority: Larger is sooner.
        timeout: Seconds from the call, or None.
        site: "file:line" of the call, when tracking is on.
        holder: Who holds what comes of it from the start: what `pool.owner(...)` named.
    """

    sizes: tuple[int, ...]
    batch: bool
    stream: int
    tag: str | None
    priority: int
    timeout: float | None
    site: str | None = None
    holder: Owner | None = None


class Keeper(Protocol):
    """What a waiting request asks of the pool that keeps it."""

    turn: Turn

    def withdraw(self, waiting: Waiting, reason: Exception | None) -> None:
        """Take it out of the queue and fail it (with the turn held); nothing where it is done."""

    def asleep(self, waiting: Waiting) -> None:
        """Hear that somebody sleeps on it now, and look for a deadlock (with the turn held)."""

    def timed_out(self, waiting: Waiting) -> Exception:
        """Make the error for a deadline that has passed (with the turn held)."""


class Waiting(Waiter):
    """A request that the pool has taken in. All state changes happen under the pool's turn.

    Attributes:
        ask: What is wanted.
        share: Who asks: the pool, a budget or a lease.
        since: When it was asked, by `clock`.
        deadline: When it gives up, by `clock`.
        owner: Who sleeps on it, while somebody does.
        awaited: How many tasks await it now.
        inline: Its thread carries out by itself what it needs, so the worker leaves it alone.
        pieces: What each of its buffers takes of the heap, in bytes; `total` is their sum.
        promised: Budgets that count it already, while it waits for memory further up.
        tries: How often `on_oom` was asked for it.
        collected: Whether the garbage collector has run for it.
    """

    __slots__ = (
        "_callbacks", "_sleepers", "ask", "awaited", "clock", "collected", "deadline", "done", "error", "home",
        "inline", "keeper", "owner", "pieces", "promised", "result", "share", "since", "total", "tries",
    )  # fmt: skip

    def __init__(self, keeper: Keeper, share: Share, ask: Ask, home: Home | None) -> None:
        super().__init__(sum(ask.sizes), ask.priority)
        self.keeper = keeper
        self.share = share
        self.ask = ask
        self.pieces = [-(-nbytes // GRANULE) * GRANULE for nbytes in ask.sizes]
        self.total = sum(self.pieces)
        self.home = home
        self.clock: Callable[[], float] = time.monotonic if home is None else home.now
        self.since = self.clock()
        self.deadline = None if ask.timeout is None else self.since + ask.timeout
        self.inline = False
        self.owner: Owner | None = None
        self.promised: list[Budget] = []
        self.awaited = 0
        self.tries = 0
        self.collected = False
        self.done = False
        self.result: Buffer | Batch | None = None
        self.error: Exception | None = None
        self._sleepers: list[Sleeper] = []
        self._callbacks: list[Callable[[], None]] = []

    def move_to(self, home: Home) -> None:
        """Go on by the clock of a loop, for a request that was made outside of any."""
        if self.home is None:
            shift = home.now() - self.clock()
            self.home, self.clock = home, home.now
            self.since += shift
            self.deadline = None if self.deadline is None else self.deadline + shift

    @property
    def remaining(self) -> float | None:
        """Seconds until its deadline, or None without one."""
        return None if self.deadline is None else max(0.0, self.deadline - self.clock())

    @property
    def age(self) -> float:
        """Seconds since it was asked."""
        return self.clock() - self.since

    @property
    def overdue(self) -> bool:
        """Whether its deadline has passed."""
        return self.deadline is not None and self.clock() >= self.deadline

    def finish(self, result: Buffer | Batch | None, error: Exception | None) -> None:
        """Settle it, with the turn held; whoever sleeps is woken by `wake` once the turn is free."""
        self.done = True
        self.owner = None
        self.result = result
        self.error = error

    def wake(self) -> None:
        """Wake the sleepers and run the callbacks of a settled request. Without the turn."""
        sleepers, self._sleepers = self._sleepers, []
        for sleeper in sleepers:
            sleeper.wake()
        callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            if self.home is None:
                callback()
            else:
                self.home.call(callback)

    def when_done(self, callback: Callable[[], None]) -> bool:
        """Keep a callback for the end; False when that has come, and the caller calls it."""
        with self.keeper.turn:
            if not self.done:
                self._callbacks.append(callback)
            return not self.done

    def admit(self, sleeper: Sleeper) -> bool:
        """Let a task sleep until the end; False when that has come."""
        with self.keeper.turn:
            if not self.done:
                self._sleepers.append(sleeper)
                self.keeper.asleep(self)
            return not self.done

    def abandon(self, sleeper: Sleeper) -> None:
        """Undo for a cancelled sleeper: the last one takes the request, or the grant that came meanwhile, with it."""
        with self.keeper.turn:
            if sleeper in self._sleepers:
                self._sleepers.remove(sleeper)
            if self.awaited == 1:
                self.keeper.withdraw(self, None)

    def expire(self) -> None:
        """Fail with `PoolTimeout`, unless it is settled."""
        with self.keeper.turn:
            if not self.done:
                self.keeper.withdraw(self, self.keeper.timed_out(self))


class ThreadSleeper:
    """A thread that waits in `allocate(timeout=...)`."""

    def __init__(self) -> None:
        self._gate = threading.Semaphore(0)

    def wake(self) -> None:
        self._gate.release()

    def sleep(self, timeout: float | None) -> None:
        """Block this thread until woken, or for `timeout` seconds."""
        self._gate.acquire(timeout=timeout)
