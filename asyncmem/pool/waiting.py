"""One request from the moment it is asked to its end: what it wants, where it stands, who sleeps on it.

The pool works on `Waiting`; the user holds a `Request`, which lets go of it. So a request that is dropped can be told
from one that still matters.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from asyncmem.core import GRANULE, Waiter

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    from asyncmem.core import Batch, Buffer
    from asyncmem.pool.flow import Flow
    from asyncmem.pool.graph import Captured
    from asyncmem.pool.home import Home, Sleeper
    from asyncmem.pool.share import Budget, Share
    from asyncmem.pool.tally import Tally

_MOST = 1 << 62


class Waiting(Waiter):
    """A request that the pool has taken in. All state changes happen under the pool's turn.

    Those that take the pool's compiled ways are made without `__init__`; the rest is then as the core has it.

    Args:
        keeper: The pool's flow.
        share: Who asks: the pool, a budget or a lease.
        sizes: Bytes of each buffer, as asked.
        home: The event loop it was asked on, or None outside of any.
    """

    __slots__ = ("_capture",)

    if TYPE_CHECKING:  # the core keeps these, and tells none of their types
        keeper: Flow
        share: Share
        home: Home | None
        promised: tuple[Budget, ...]  # budgets that count it already, while it waits for memory further up
        owner: Hashable  # who sleeps on it, while somebody does
        holder: Hashable  # who holds what comes of it from the start: what `pool.owner(...)` named
        result: Buffer | Batch | None
        _callbacks: tuple[Callable[[], None], ...]
        _sleepers: tuple[Sleeper, ...]
        _capture: Captured

    def __init__(self, keeper: Flow, share: Share, sizes: tuple[int, ...], home: Home | None) -> None:
        self.keeper = keeper
        self.share = share
        self.home = home
        self.since = self.clock()
        if len(sizes) == 1:
            self.nbytes = sizes[0]
            self.total = -(-sizes[0] // GRANULE) * GRANULE
        else:
            self._sizes = sizes
            self.nbytes = min(sum(sizes), _MOST)
            self.total = min(sum(self.pieces), _MOST)

    @property
    def capture(self) -> Captured | None:
        """The graph that its memory is for, and the captured stream that will be its home; None for most."""
        return getattr(self, "_capture", None)

    @capture.setter
    def capture(self, capture: Captured) -> None:
        self._capture = capture

    @property
    def sizes(self) -> tuple[int, ...]:
        """Bytes of each buffer, as asked."""
        return (self.nbytes,) if self._sizes is None else self._sizes

    @property
    def clock(self) -> Callable[[], float]:
        """What tells the time here."""
        return time.monotonic if self.home is None else self.home.now

    @property
    def pieces(self) -> Sequence[int]:
        """What each of its buffers takes of the heap, in bytes; `total` is their sum."""
        if self._sizes is None:
            return (self.total,)
        return [-(-nbytes // GRANULE) * GRANULE for nbytes in self._sizes]

    def tallies(self) -> tuple[Tally, ...]:
        """Answer where it counts: at the pool, and at the budgets and leases it was asked of."""
        share = self.share
        return (share.tally,) if share.parent is None else tuple(one.tally for one in share.lineage())

    def limit_to(self, timeout: float | None) -> None:
        """Give up so many seconds after the call; never for None."""
        if timeout is not None:
            self.timeout = timeout
            self.deadline = self.since + timeout

    def move_to(self, home: Home) -> None:
        """Go on by the clock of a loop, for a request that was made outside of any."""
        if self.home is None:
            shift = home.now() - self.clock()
            self.home = home
            self.since += shift
            self.deadline = None if self.deadline is None else self.deadline + shift

    @property
    def remaining(self) -> float | None:
        """Seconds until its deadline, or None without one."""
        return None if self.deadline is None else max(0.0, self.deadline - self.clock())

    @property
    def may_block_for(self) -> float | None:
        """Seconds for which an errand for it may wait for work of the device; None for as long as that takes.

        A synchronous caller carries it out by itself: no longer than it said, and an event loop's thread not at all.
        """
        if not self.inline:
            return None
        return self.remaining if self.home is None else 0.0

    @property
    def age(self) -> float:
        """Seconds since it was asked."""
        return self.clock() - self.since

    @property
    def overdue(self) -> bool:
        """Whether its deadline has passed."""
        return self.deadline is not None and self.clock() >= self.deadline

    def _wake_others(self) -> None:
        for sleeper in self._sleepers:
            sleeper.wake()
        self._sleepers = ()
        for callback in self._callbacks:
            if self.home is None:
                callback()
            else:
                self.home.call(callback)
        self._callbacks = ()

    def when_done(self, callback: Callable[[], None]) -> bool:
        """Keep a callback for the end; False when that has come, and the caller calls it."""
        with self.keeper.turn:
            if not self.done:
                self._callbacks += (callback,)
            return not self.done

    def admit(self, sleeper: Sleeper) -> bool:
        """Let a task sleep until the end; False when that has come."""
        with self.keeper.turn:
            if not self.done:
                self.keeper.asleep(self)
            if not self.done:  # it may be the victim of the deadlock that it closed
                self._sleepers += (sleeper,)
            return not self.done

    def abandon(self, sleeper: Sleeper) -> None:
        """Undo for a cancelled sleeper: the last one takes the request, or the grant that came meanwhile, with it."""
        with self.keeper.turn:
            self._sleepers = tuple(one for one in self._sleepers if one is not sleeper)
            if self.awaited == 1:
                self.keeper.withdraw(self, None)

    def expire(self) -> None:
        """Fail with `PoolTimeout`, unless it is settled."""
        with self.keeper.turn:
            if not self.done:
                self.keeper.withdraw(self, self.keeper.timed_out(self))
