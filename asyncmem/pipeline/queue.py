"""A queue of values and of the tasks that wait for them, in order of arrival.

`put` books a value for the first waiting getter before it wakes that, and a getter that is cancelled afterwards puts it
back in front. So a value is in the queue or with exactly one getter, whatever is cancelled when.
"""

from __future__ import annotations

import math
from collections import deque
from typing import TYPE_CHECKING, Generic, TypeAlias, TypeVar

from anyio import WouldBlock
from anyio.lowlevel import checkpoint

from asyncmem.devices.awaiting import AsyncioSleeper, TrioSleeper, sleeper_here

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")
_Getter: TypeAlias = tuple[AsyncioSleeper | TrioSleeper, list[T]]
"""What a waiting task is woken by, and the value that is booked for it."""

_STREAK = 100  # values taken or put without a wait before the task yields to the loop


class ItemQueue(Generic[T]):
    """An unbounded queue whose `put` never waits.

    Args:
        window: How many values may be taken and not released.
    """

    def __init__(self, window: float = math.inf) -> None:
        self._window = window
        self._values: deque[T] = deque()
        self._getters: deque[_Getter[T]] = deque()
        self._ending: Callable[[], Exception] | None = None
        self._streak = 0

    def __len__(self) -> int:
        return len(self._values)

    @property
    def getters(self) -> int:
        """Tasks that wait for a value."""
        return len(self._getters)

    def put(self, value: T) -> None:
        """Give a value to the first waiting getter, or keep it."""
        self._values.append(value)
        if self._getters:
            self._match()

    async def get(self) -> T:
        """Take the first value, or wait for one. Yield to the loop only in a wait, and once in a while.

        Raises:
            Exception: What `end` was given, once no value is left.

        Cancelled: nothing was taken.
        """
        if self._values and self._window > 0:
            self._streak += 1
            if self._streak > _STREAK:
                await self._yield()
        if self._values and self._window > 0:
            self._window -= 1
            return self._values.popleft()
        if self._ending is None or self._values:
            getter: _Getter[T] = sleeper_here("a queue"), []
            self._getters.append(getter)
            self._streak = 0
            try:
                await getter[0]
            except BaseException:
                self._abandon(getter)
                raise
            if getter[1]:
                return getter[1].pop()
        assert self._ending is not None
        raise self._ending()

    def get_nowait(self) -> T:
        """Take the first value.

        Raises:
            WouldBlock: There is none yet.
            Exception: What `end` was given, once no value is left.
        """
        if self._values and self._window > 0:
            self._window -= 1
            return self._values.popleft()
        if self._ending is None or self._values:
            raise WouldBlock
        raise self._ending()

    async def checkpoint_sometimes(self) -> None:
        """Yield to the loop once in a while, for tasks that only put."""
        self._streak += 1
        if self._streak > _STREAK:
            await self._yield()

    def release(self) -> None:
        """Let one more value be taken."""
        self._window += 1
        self._match()

    def end(self, ending: Callable[[], Exception]) -> None:
        """Raise an error in every `get` that finds no value from now on."""
        self._ending = ending
        if not self._values:
            while self._getters:
                self._getters.popleft()[0].wake()

    def clear(self) -> None:
        """Drop the values."""
        self._values.clear()

    async def _yield(self) -> None:
        self._streak = 0
        await checkpoint()

    def _match(self) -> None:
        while self._values and self._getters and self._window > 0:
            self._window -= 1
            sleeper, booked = self._getters.popleft()
            booked.append(self._values.popleft())
            sleeper.wake()

    def _abandon(self, getter: _Getter[T]) -> None:
        """Remove a getter that was cancelled, before or after a value was booked for it."""
        if getter in self._getters:
            self._getters.remove(getter)
        elif getter[1]:
            self._values.appendleft(getter[1].pop())
            self.release()
