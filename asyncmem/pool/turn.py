"""The pool's one lock, built so that a finalizer can never block on it.

A buffer may be dropped anywhere: by the garbage collector in the middle of the pool's own code, in another thread, in
a signal handler. Such a drop must not wait for the lock, and its wake-up must not get lost. So whoever cannot take the
lock at once leaves a note, and whoever holds the lock settles all notes before it lets go, and looks once more after.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType


class Turn:
    """Mutual exclusion over the pool's decisions.

    Args:
        settle: Called with the lock held, before each release: pumps the queues and answers what to call once the
            lock is free (wake-ups and orders to the worker). Must not raise.
    """

    def __init__(self, settle: Callable[[], list[Callable[[], None]]]) -> None:
        self._settle = settle
        self._lock = threading.Lock()
        self._notes: deque[Callable[[], None]] = deque()

    def __enter__(self) -> None:
        """Wait for the lock. Not for finalizers, which use `post`."""
        self._lock.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Settle what is owed and let go."""
        self.leave()

    def acquire(self) -> None:
        """Wait for the lock, as ``with`` does; `leave` it in a ``finally``."""
        self._lock.acquire()

    def leave(self) -> None:
        """Settle what is owed and let go of the lock."""
        notes, lock = self._notes, self._lock
        while True:
            owed: list[Callable[[], None]] = []
            try:
                # What settling itself gives rise to comes before the wake-ups, so that nobody acts ahead of it.
                while True:
                    while notes:
                        notes.popleft()()
                    owed += self._settle()
                    if not notes:
                        break
            finally:
                lock.release()  # also after a defect, which would be a hang otherwise
            for call in owed:
                call()
            # A note that came while the lock was held was left to us; one that comes now finds the lock free.
            if not notes or not lock.acquire(blocking=False):
                return

    def renew(self) -> None:
        """Start over in a forked child, where whoever held the lock does not exist."""
        self._lock = threading.Lock()
        self._notes.clear()

    def take_quickly(self) -> bool:
        """Take the lock if it is free and nobody left a note; then either `leave`, or `give_up`, or `post` again."""
        return not self._notes and self._lock.acquire(blocking=False)

    def give_up(self) -> None:
        """Let go of the lock after a step that changed nothing, and before a `post`, which settles."""
        self._lock.release()

    def post(self, note: Callable[[], None]) -> None:
        """Have a note run with the lock held, now or by whoever holds it; never waits. From any thread or finalizer."""
        self._notes.append(note)
        if self._lock.acquire(blocking=False):
            self.leave()
