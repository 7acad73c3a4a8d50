"""Looks for fences that somebody waits for.

OpenCL and Metal can call back, on a thread of the driver's: Python there meets the driver's locks with the
interpreter's in hand, and the end of the program finds it anywhere. So a thread of our own asks, which by OpenCL costs
a tenth of a microsecond a fence.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

from asyncmem.devices.notices import call_all

_SHORTEST: Final = 50e-6
_LONGEST: Final = 2e-3
_PATIENCE: Final = 8  # a wait is longer than the work by at most an eighth, or by the shortest


def pause_after(waited: float) -> float:
    """Return how long to sleep before asking again for what has been waited for so long (seconds)."""
    return min(max(waited / _PATIENCE, _SHORTEST), _LONGEST)


class Awaited(Protocol):
    """The part of a fence that is asked."""

    def over(self) -> bool:
        """Tell whether there is nothing left to wait for, without raising."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class _Wait:
    fence: Awaited
    callback: Callable[[], None]
    since: float


class Watcher:
    """Calls back once fences are over, on a thread that the first of them starts."""

    def __init__(self, name: str) -> None:
        """Name the thread; it does not start yet."""
        self.name = name
        self._waits: list[_Wait] = []
        # Re-entrant: a finalizer may interrupt the holder on the same thread and ask for a fence.
        self._changed = threading.Condition(threading.RLock())
        self._thread: threading.Thread | None = None
        self._serving = False
        self._stopped = False

    def add(self, fence: Awaited, callback: Callable[[], None]) -> None:
        """Call back once the fence is over."""
        with self._changed:
            self._waits.append(_Wait(fence, callback, time.perf_counter()))
            if not self._serving:
                self._serving = True
                self._thread = threading.Thread(target=self._serve, name=self.name, daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def drop(self, fence: Awaited, callback: Callable[[], None]) -> None:
        """Forget a callback that has not been called, once."""
        with self._changed:
            for wait in list(self._waits):
                if wait.fence is fence and wait.callback == callback:
                    self._waits.remove(wait)
                    return

    def stop(self) -> None:
        """Let the thread end once nobody waits."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def join(self) -> None:
        """Wait for the end of the thread (blocks), unless this is that thread."""
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _serve(self) -> None:
        while self._wait_for_work():
            call_all(self._take_those_that_are_over())

    def _wait_for_work(self) -> bool:
        with self._changed:
            while not self._waits:
                if self._stopped:
                    self._serving = False  # who comes now needs another thread; this one can still be joined
                    return False
                self._changed.wait()
            youngest = self._waits[-1].since
            self._changed.wait(pause_after(time.perf_counter() - youngest))
            return True

    def _take_those_that_are_over(self) -> list[Callable[[], None]]:
        with self._changed:
            over = [wait for wait in list(self._waits) if wait.fence.over()]
            # Asking may have run a finalizer, which has dropped one of them.
            over = [wait for wait in over if wait in self._waits]
            for wait in over:
                self._waits.remove(wait)
            return [wait.callback for wait in over]
