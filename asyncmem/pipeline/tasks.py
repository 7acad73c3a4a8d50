"""What the tasks of runners wait in, and what becomes of their errors.

In an `ItemQueue`, `put` books a value for the first waiting getter before it wakes that, and a getter that is cancelled
afterwards puts it back in front. So a value is in the queue or with exactly one getter, whatever is cancelled when.
"""

import math
import traceback
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from types import FrameType
from typing import Generic, TypeVar

import anyio
from anyio import WouldBlock
from anyio.lowlevel import checkpoint

from asyncmem.devices.awaiting import AsyncioSleeper, TrioSleeper, sleeper_here
from asyncmem.figures import format_duration
from asyncmem.pool.alarm import frames_of

T = TypeVar("T")

_STREAK = 100  # values taken or put without a wait before the task yields to the loop


class ItemQueue(Generic[T]):
    """An unbounded queue whose `put` never waits.

    Args:
        window: How many values may be taken and not released.
    """

    def __init__(self, window: float = math.inf) -> None:
        self._window = window
        self._values: deque[T] = deque()
        # What waiting tasks are woken by, and the value that is booked for each. Thousands may leave in any order.
        self._getters: OrderedDict[AsyncioSleeper | TrioSleeper, list[T]] = OrderedDict()
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
            sleeper = sleeper_here("a queue")
            booked = self._getters[sleeper] = []
            self._streak = 0
            try:
                await sleeper
            except BaseException:
                self._abandon(sleeper, booked)
                raise
            if booked:
                return booked.pop()
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
                self._getters.popitem(last=False)[0].wake()

    def clear(self) -> None:
        """Drop the values."""
        self._values.clear()

    async def _yield(self) -> None:
        self._streak = 0
        await checkpoint()

    def _match(self) -> None:
        while self._values and self._getters and self._window > 0:
            self._window -= 1
            sleeper, booked = self._getters.popitem(last=False)
            booked.append(self._values.popleft())
            sleeper.wake()

    def _abandon(self, sleeper: AsyncioSleeper | TrioSleeper, booked: list[T]) -> None:
        """Remove a getter that was cancelled, before or after a value was booked for it."""
        if self._getters.pop(sleeper, None) is None and booked:
            self._values.appendleft(booked.pop())
            self.release()


async def within(seconds: float | None, work: Awaitable[T]) -> T:
    """Await something for at most so many seconds.

    Raises:
        TimeoutError: It took longer, and was cancelled.
    """
    with anyio.move_on_after(seconds) as limit:
        return await work
    assert limit.cancelled_caught
    raise TimeoutError(f"it took longer than {format_duration(seconds or 0.0)}")


def is_own_error(error: BaseException) -> bool:
    """Return whether an error comes from the code that was called, not from its cancellation or the end of the process.

    On asyncio it may be a `CancelledError`: of something else that it awaited. Taken for a cancellation of the worker,
    it would end that in silence.
    """
    if isinstance(error, Exception):
        return True
    return isinstance(error, anyio.get_cancelled_exc_class()) and anyio.current_effective_deadline() > -math.inf


def describe_error(error: BaseException) -> str:
    """Describe an error in one line; of a group, each of its errors."""
    if isinstance(error, BaseExceptionGroup):
        return "; ".join(describe_error(one) for one in error.exceptions)
    try:
        text = str(error)
    except Exception:  # noqa: BLE001  # of the program's class, and no reason to lose what it is
        text = "its text cannot be made"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def clear_frames(error: BaseException) -> None:
    """Take the values out of the frames of an error and of those behind it: they would hold memory for as long.

    Behind a cancellation is what has happened to others, which is left alone.
    """
    in_use: set[FrameType] = set()
    if isinstance(error, Exception):
        # Where tasks will go on: one may have caught the error, and before CPython 3.13 to clear its frame ended it.
        in_use = {frame for task in anyio.get_running_tasks() for frame in frames_of(task.coro)}
    for one in _behind(error):
        for frame, _ in traceback.walk_tb(one.__traceback__):
            if frame not in in_use:
                with suppress(RuntimeError):  # it is running
                    frame.clear()


def _behind(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    todo: list[BaseException | None] = [error]
    while todo:
        one = todo.pop()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            yield one
            if isinstance(one, BaseExceptionGroup):
                todo += one.exceptions
            if isinstance(one, Exception):
                todo += [one.__cause__, one.__context__]
