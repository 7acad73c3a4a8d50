"""Values that wait for tasks and tasks that wait for values, in order of arrival.

Who puts a value books it for the first taker before it wakes it, and a taker that is cancelled afterwards puts it back
in front. So a value is in the line or with exactly one taker, whatever is cancelled when.
"""

from __future__ import annotations

import math
from collections import deque
from typing import TYPE_CHECKING, Generic, TypeVar

from anyio import WouldBlock
from anyio.lowlevel import checkpoint

from asyncmem.pool.loops import running_loop

if TYPE_CHECKING:
    from collections.abc import Callable

    from asyncmem.pool.loops import EventLoop, Sleeper

T = TypeVar("T")

_STREAK = 100  # values taken, or paused for, without a wait before the loop turns once


class Line(Generic[T]):
    """An unbounded queue whose `put` never waits.

    Args:
        places: How many values may be taken before `reopen` has brought places back.
    """

    def __init__(self, places: float = math.inf) -> None:
        self._places = places
        self._values: deque[T] = deque()
        self._takers: deque[_Taker[T]] = deque()
        self._ending: Callable[[], Exception] | None = None
        self._loop: EventLoop | None = None
        self._streak = 0

    def __len__(self) -> int:
        return len(self._values)

    @property
    def takers(self) -> int:
        """Tasks that wait for a value."""
        return sum(not taker.settled for taker in self._takers)

    def put(self, value: T) -> None:
        """Give a value to the first who waits, or keep it."""
        self._values.append(value)
        if self._takers:
            self._match()

    async def take(self) -> T:
        """Take the first value, or wait for one. The loop turns only in a wait, and now and then.

        Raises:
            Exception: What `end` was given, once no value is left.

        Cancelled: nothing was taken.
        """
        if self._values and self._places > 0:
            if self._streak >= _STREAK:
                await self._turn()
            else:
                self._streak += 1
        if self._values and self._places > 0:
            self._places -= 1
            return self._values.popleft()
        if self._ending is not None and not self._values:
            raise self._ending()
        taker = _Taker(self)
        self._takers.append(taker)
        self._streak = 0
        await self._running().park(taker)
        if taker.booked:
            return taker.booked.pop()
        assert self._ending is not None
        raise self._ending()

    def take_nowait(self) -> T:
        """Take the first value.

        Raises:
            WouldBlock: There is none yet.
            Exception: What `end` was given, once no value is left.
        """
        if self._values and self._places > 0:
            self._places -= 1
            return self._values.popleft()
        if self._ending is not None and not self._values:
            raise self._ending()
        raise WouldBlock

    async def pause(self) -> None:
        """Let the loop turn now and then, for those who only put."""
        self._streak += 1
        if self._streak >= _STREAK:
            await self._turn()

    def reopen(self) -> None:
        """Bring the place of a value back."""
        self._places += 1
        self._match()

    def end(self, ending: Callable[[], Exception]) -> None:
        """Let everybody who finds no value from now on have an error."""
        self._ending = ending
        if not self._values:
            while self._takers:
                self._takers.popleft().settle()

    def clear(self) -> None:
        """Drop the values."""
        self._values.clear()

    def abandon(self, taker: _Taker[T]) -> None:
        """Hear that a taker was cancelled, before or after a value was booked for it."""
        taker.settled = True
        if taker.booked:
            self._values.appendleft(taker.booked.pop())
            self.reopen()

    async def _turn(self) -> None:
        self._streak = 0
        await checkpoint()

    def _running(self) -> EventLoop:
        loop = self._loop = running_loop(self._loop)
        assert loop is not None, "a line is taken from in a task of an event loop"
        return loop

    def _match(self) -> None:
        while self._values and self._takers and self._places > 0:
            taker = self._takers.popleft()
            if not taker.settled:
                self._places -= 1
                taker.booked.append(self._values.popleft())
                taker.settle()


class _Taker(Generic[T]):
    """A task that waits, as its event loop sees it."""

    __slots__ = ("_line", "_sleeper", "booked", "settled")
    deadline: float | None = None

    def __init__(self, line: Line[T]) -> None:
        self._line = line
        self._sleeper: Sleeper | None = None
        self.booked: list[T] = []
        self.settled = False  # there is nothing to wait for any more; who was cancelled is passed over

    def settle(self) -> None:
        self.settled = True
        if self._sleeper is not None:
            self._sleeper.wake()

    def admit(self, sleeper: Sleeper) -> bool:
        self._sleeper = sleeper
        return not self.settled

    def abandon(self, sleeper: Sleeper) -> None:  # noqa: ARG002 - a taker has one sleeper
        self._line.abandon(self)

    def expire(self) -> None:
        """Do nothing: a line sets no deadlines."""
