"""Fences in general: threads that call back from them, some that a thread asks for others, one that stands for several.

OpenCL and Metal can call back, on a thread of the driver's: Python there meets the driver's locks with the
interpreter's in hand, and the end of the program finds it anywhere. So a thread of our own asks, which by OpenCL costs
a tenth of a microsecond a fence.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from asyncmem.devices.awaiting import call_all, join_thread
from asyncmem.devices.base import Fence

if TYPE_CHECKING:
    from collections.abc import Generator


class FenceThread(ABC):
    """A daemon thread that calls back as fences are reached. Its first work starts it, `stop` ends it after the last.

    It knows nothing of the stream or device that it works for, so that these can be forgotten, and stop it.
    """

    def __init__(self, name: str) -> None:
        """Name the thread; it does not start yet."""
        self.name = name
        # Re-entrant: a finalizer may interrupt the holder on the same thread and ask for a fence.
        self._lock = threading.RLock()  # entered by itself: an interrupt could come between the condition and its lock
        self._changed = threading.Condition(self._lock)
        self._waits: list[tuple[Fence, Callable[[], None], float]] = []
        self._thread: threading.Thread | None = None
        self._serving = False
        self._stopped = False

    @abstractmethod
    def notify(self, fence: Fence, callback: Callable[[], None]) -> None:
        """Call back once when the fence is over: now, or on the thread."""

    def forget(self, fence: Fence, callback: Callable[[], None]) -> None:
        """Drop a callback that has not run, once."""
        with self._lock:
            for wait in list(self._waits):
                if wait[0] is fence and wait[1] == callback:
                    self._waits.remove(wait)
                    return

    def stop(self) -> None:
        """Let the thread end once there is nothing left to do."""
        with self._lock:
            self._stopped = True
            self._changed.notify_all()

    def join(self) -> None:
        """Wait for the end of a thread that is stopped (blocks), unless this is that thread."""
        join_thread(self._thread)

    @abstractmethod
    def _serve(self) -> None:
        """Call back until the thread is to end."""

    def _start(self) -> None:
        """Start the thread unless it runs (with the lock held)."""
        if not self._serving:
            self._thread = threading.Thread(target=self._serve, name=self.name, daemon=True)
            self._thread.start()
            self._serving = True

    def _take_due(self) -> list[Callable[[], None]]:
        # Without the lock: to ask may take those of a driver, and run a finalizer, which drops one of them.
        over = [wait for wait in list(self._waits) if wait[0].over()]
        with self._lock:
            due = [wait for wait in over if wait in self._waits]
            for wait in due:
                self._waits.remove(wait)
        return [callback for _, callback, _ in due]


class ThreadedFence(Fence):
    """A fence that a thread calls back from."""

    _thread: FenceThread

    def notify(self, callback: Callable[[], None]) -> None:
        """Call back once, now or on the thread, also where work has failed: ask `done()` which it was."""
        self._thread.notify(self, callback)

    def forget(self, callback: Callable[[], None]) -> None:
        """Drop a callback that has not run."""
        self._thread.forget(self, callback)


_SHORTEST: Final = 50e-6
_LONGEST: Final = 2e-3
_RATIO: Final = 8  # a wait is longer than the work by at most an eighth, or by the shortest


def pause_after(waited: float) -> float:
    """Return how long to sleep before asking again for what has been waited for so long (seconds)."""
    return min(max(waited / _RATIO, _SHORTEST), _LONGEST)


class FencePoller(FenceThread):
    """Asks for fences again and again."""

    def notify(self, fence: Fence, callback: Callable[[], None]) -> None:
        """Call back once the fence is over."""
        if fence.over():
            callback()
            return
        with self._lock:
            self._waits.append((fence, callback, time.perf_counter()))
            self._start()
            self._changed.notify_all()

    def _serve(self) -> None:
        while self._wait_for_work():
            call_all(self._take_due())

    def _wait_for_work(self) -> bool:
        with self._lock:
            while not self._waits:
                if self._stopped:
                    self._serving = False  # a later fence needs another thread; this one can still be joined
                    return False
                self._changed.wait()
            self._changed.wait(pause_after(time.perf_counter() - self._waits[-1][2]))
            return True


class PolledFence(ThreadedFence):
    """A fence with a query, `done`. A thread of the device queries it while something waits."""

    def __init__(self, poller: FencePoller) -> None:
        """Run the callbacks on this thread from now on."""
        self._thread = poller

    def block(self, timeout: float | None = None) -> bool:
        """Wait on this thread (**blocks**); signals are heard.

        Raises:
            DeviceError: As `done`.
        """
        return self.outlast(timeout) and self.done()

    def outlast(self, timeout: float | None = None) -> bool:
        """Wait on this thread until there is nothing left to wait for (**blocks**), without raising."""
        began = time.perf_counter()
        while not self.over():
            waited = time.perf_counter() - began
            if timeout is not None and waited >= timeout:
                return False
            pause = pause_after(waited)
            time.sleep(pause if timeout is None else min(pause, timeout - waited))
        return True

    def __await__(self) -> Generator[object, object, None]:
        """Wait on asyncio, uvloop or trio. Cancelling changes nothing on the device and leaves nothing behind.

        Raises:
            DeviceError: As `done`.
        """
        yield from super().__await__()
        self.done()


class Joined(Fence):
    """Stands for all of `parts`. It holds them, and asks one after another."""

    def __init__(self, parts: Sequence[Fence]) -> None:
        """Take the fences; none is fine and means that there is nothing to wait for."""
        self._parts = tuple(parts)
        self._relays: list[_Relay] = []

    def done(self) -> bool:
        """Return whether every part is reached."""
        return all(part.done() for part in self._parts)

    def block(self, timeout: float | None = None) -> bool:
        """Wait on this thread for every part; False when `timeout` seconds passed first."""
        if timeout is None:
            return all(part.block() for part in self._parts)
        deadline = time.monotonic() + timeout
        return all(part.block(max(0.0, deadline - time.monotonic())) for part in self._parts)

    def notify(self, callback: Callable[[], None]) -> None:
        """Call back once, when the last part is reached."""
        relay = _Relay([part for part in self._parts if not part.done()], callback, self._relays)
        self._relays.append(relay)
        relay.step()

    def forget(self, callback: Callable[[], None]) -> None:
        """Drop a callback that has not run."""
        for relay in list(self._relays):
            if relay.callback == callback:
                relay.cancel()
                return


class _Relay:
    """Waits for one part after another, so that at any time only one of them knows of the callback."""

    def __init__(self, parts: list[Fence], callback: Callable[[], None], siblings: list[_Relay]) -> None:
        self.callback = callback
        self._parts = parts
        self._siblings = siblings
        self._current: Fence | None = None

    def step(self) -> None:
        if self._parts:
            self._current = self._parts.pop()
            self._current.notify(self.step)
        elif self._leave():
            self.callback()

    def cancel(self) -> None:
        if self._leave() and self._current is not None:
            self._current.forget(self.step)

    def _leave(self) -> bool:
        # The last step and a cancellation may come from two threads at once; the list lets only one of them leave.
        try:
            self._siblings.remove(self)
        except ValueError:
            return False
        return True
