"""Something that happens once, on any thread, and can be awaited on any loop."""

from __future__ import annotations

import threading
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Generic, TypeAlias, TypeVar

from asyncmem.devices.awaiting import sleeper_here
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
    """A thread that waits."""

    def __init__(self) -> None:
        self._gate: Gate = SimpleQueue()

    def wake(self) -> None:
        """Wake the thread, from any thread."""
        self._gate.put(None)

    def sleep(self, timeout: float | None) -> None:
        """Block until it is woken, or for so many seconds."""
        wait_at(self._gate, timeout)


class Latch(Generic[T]):
    """The outcome of a call that another thread makes.

    Args:
        call: What to do; run by `__call__`, once, on the thread that it was given to. None where only the end matters.

    Attributes:
        done: Whether it has happened.
    """

    def __init__(self, call: Callable[[], T] | None = None) -> None:
        self.call = call
        self._lock = threading.Lock()
        self._sleepers: list[Sleeper] = []
        self.done = False
        self._result: T | None = None
        self._error: BaseException | None = None

    def __call__(self) -> None:
        """Make the call and keep its outcome, an error too, for the waiting threads and tasks."""
        call, self.call = self.call, None
        try:
            self._result = None if call is None else call()
        except BaseException as error:  # raised again in the waiter
            self._error = error
            if not isinstance(error, Exception):
                raise
        finally:
            with self._lock:
                self.done = True
                sleepers, self._sleepers = self._sleepers, []
            for sleeper in sleepers:
                sleeper.wake()

    def result(self) -> T | None:
        """Return the result of the call, or raise its error; None before it is done."""
        if self._error is not None:
            raise self._error
        return self._result

    def forget(self) -> None:
        """Drop the error, whose traceback would keep this alive."""
        self._error = None

    async def wait(self, timeout: float | None = None) -> T | None:
        """Wait for it. Cancelled or late, it happens all the same."""
        loop = need_running_loop(self)
        sleeper = sleeper_here(self)
        timer = None if timeout is None else loop.call_at(loop.now() + timeout, sleeper.wake)
        try:
            if self._admit(sleeper):
                await sleeper
        finally:
            self._abandon(sleeper)
            if timer is not None:
                timer.cancel()
        return self.result()

    def block(self, timeout: float | None = None) -> T | None:
        """Wait for it on this thread."""
        sleeper = ThreadSleeper()
        try:
            if self._admit(sleeper):
                sleeper.sleep(timeout)
        finally:
            self._abandon(sleeper)
        return self.result()

    def _admit(self, sleeper: Sleeper) -> bool:
        with self._lock:
            if not self.done:
                self._sleepers.append(sleeper)
            return not self.done

    def _abandon(self, sleeper: Sleeper) -> None:
        with self._lock:
            if sleeper in self._sleepers:
                self._sleepers.remove(sleeper)
