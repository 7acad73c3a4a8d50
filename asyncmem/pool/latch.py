"""Something that happens once, on any thread, and can be awaited on any loop."""

from __future__ import annotations

import threading
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Generic, TypeAlias, TypeVar

from asyncmem.pool.loops import need_running_loop

if TYPE_CHECKING:
    from collections.abc import Callable

    from asyncmem.pool.loops import Sleeper

T = TypeVar("T")


Gate: TypeAlias = "SimpleQueue[None]"
"""What a thread blocks on: one item for each time that it is to look. A semaphore of threading's costs 2 µs to make."""


def wait_at(gate: Gate, timeout: float | None) -> bool:
    """Block until there is an item; return False when the seconds have passed first."""
    try:
        gate.get(timeout=timeout)
    except Empty:
        return False
    return True


class ThreadSleeper:
    """A thread that waits for a request."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate

    def wake(self) -> None:
        """Let the thread go on. From any thread."""
        self._gate.put(None)


class Latch(Generic[T]):
    """The outcome of a call that another thread makes. A place to park in.

    Args:
        call: What to do; run by `__call__`, once, on the thread that it was given to. None where only the end matters.

    Attributes:
        done: Whether it has happened.
    """

    def __init__(self, call: Callable[[], T] | None = None) -> None:
        self.deadline: float | None = None
        self._call = call
        self._lock = threading.Lock()
        self._sleepers: list[Sleeper] = []
        self.done = False
        self._result: T | None = None
        self._error: BaseException | None = None

    def __call__(self) -> None:
        """Make the call and keep its outcome, an error too, for the waiting threads and tasks."""
        try:
            self._result = None if self._call is None else self._call()
        except BaseException as error:  # raised again in the waiter
            self._error = error
            if not isinstance(error, Exception):
                raise
        finally:
            with self._lock:
                self.done = True
            self.expire()

    def result(self) -> T | None:
        """Return what the call answered, or raise what it raised; None when it has not happened in time."""
        if self._error is not None:
            raise self._error
        return self._result

    def forget(self) -> None:
        """Keep its error no more, whose traceback would keep this."""
        self._error = None

    async def wait(self, timeout: float | None = None) -> T | None:
        """Wait for it. Cancelled or late, it happens all the same."""
        loop = need_running_loop(self)
        self.deadline = None if timeout is None else loop.now() + timeout
        if not self.done:
            await loop.park(self)
        return self.result()

    def block(self, timeout: float | None = None) -> T | None:
        """Wait for it on this thread."""
        gate: Gate = SimpleQueue()
        sleeper = ThreadSleeper(gate)
        if self.admit(sleeper):
            try:
                wait_at(gate, timeout)
            finally:
                self.abandon(sleeper)
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
        """Wake the waiting thread or task: it has happened, or the deadline has passed."""
        with self._lock:
            sleepers, self._sleepers = self._sleepers, []
        for sleeper in sleepers:
            sleeper.wake()
