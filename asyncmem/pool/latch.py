"""Something that happens once, on any thread, and can be awaited on any loop."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Generic, TypeVar

from asyncmem.pool.loops import need_running_loop

if TYPE_CHECKING:
    from collections.abc import Callable

    from asyncmem.pool.loops import Sleeper

T = TypeVar("T")


class Latch(Generic[T]):
    """The outcome of a call that another thread makes. A place to park in.

    Args:
        call: What to do; run by `__call__`, once, by whoever it was given to.
    """

    def __init__(self, call: Callable[[], T]) -> None:
        self.deadline: float | None = None
        self._call = call
        self._lock = threading.Lock()
        self._sleepers: list[Sleeper] = []
        self._done = threading.Event()
        self._result: T | None = None
        self._error: BaseException | None = None

    def __call__(self) -> None:
        """Make the call and keep its outcome, an error too, for whoever waits."""
        try:
            self._result = self._call()
        except Exception as error:  # noqa: BLE001 -- raised again in the waiter
            self._error = error
        with self._lock:
            self._done.set()
        self.expire()

    @property
    def done(self) -> bool:
        """Whether it has happened."""
        return self._done.is_set()

    def result(self) -> T | None:
        """Answer what the call answered, or raise what it raised; None when it has not happened in time."""
        if self._error is not None:
            raise self._error
        return self._result

    async def wait(self, timeout: float | None = None) -> T | None:
        """Wait for it. Cancelled or late, it happens all the same."""
        loop = need_running_loop(self)
        self.deadline = None if timeout is None else loop.now() + timeout
        if not self.done:
            await loop.park(self)
        return self.result()

    def block(self, timeout: float | None = None) -> T | None:
        """Wait for it on this thread."""
        self._done.wait(timeout)
        return self.result()

    def admit(self, sleeper: Sleeper) -> bool:
        """Let a task sleep until it has happened; False when it has."""
        with self._lock:
            if not self.done:
                self._sleepers.append(sleeper)
            return not self.done

    def abandon(self, sleeper: Sleeper) -> None:
        """Forget a cancelled sleeper."""
        with self._lock:
            if sleeper in self._sleepers:
                self._sleepers.remove(sleeper)

    def expire(self) -> None:
        """Wake who waits: it has happened, or the deadline has passed."""
        with self._lock:
            sleepers, self._sleepers = self._sleepers, []
        for sleeper in sleepers:
            sleeper.wake()
