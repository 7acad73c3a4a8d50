"""Fences in general: some that a thread asks for others, and one that stands for several.

OpenCL and Metal can call back, on a thread of the driver's: Python there meets the driver's locks with the
interpreter's in hand, and the end of the program finds it anywhere. So a thread of our own asks, which by OpenCL costs
a tenth of a microsecond a fence.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from asyncmem.devices.awaiting import call_all, join_thread
from asyncmem.devices.base import Fence
from asyncmem.errors import DeviceError

if TYPE_CHECKING:
    from collections.abc import Generator


_SHORTEST: Final = 50e-6
_LONGEST: Final = 2e-3
_RATIO: Final = 8  # a wait is longer than the work by at most an eighth, or by the shortest


def pause_after(waited: float) -> float:
    """Return how long to sleep before asking again for what has been waited for so long (seconds)."""
    return min(max(waited / _RATIO, _SHORTEST), _LONGEST)


@dataclass(frozen=True, slots=True, eq=False)
class _Wait:
    fence: PolledFence
    callback: Callable[[], None]
    since: float


class FencePoller:
    """Calls back once fences are over, on a thread that the first of them starts."""

    def __init__(self, name: str) -> None:
        """Name the thread; it does not start yet."""
        self.name = name
        self._waits: list[_Wait] = []
        # Re-entrant: a finalizer may interrupt the holder on the same thread and ask for a fence.
        self._lock = threading.RLock()  # entered by itself: an interrupt could come between the condition and its lock
        self._changed = threading.Condition(self._lock)
        self._thread: threading.Thread | None = None
        self._serving = False
        self._stopped = False

    def add(self, fence: PolledFence, callback: Callable[[], None]) -> None:
        """Call back once the fence is over."""
        with self._lock:
            self._waits.append(_Wait(fence, callback, time.perf_counter()))
            if not self._serving:
                self._serving = True
                self._thread = threading.Thread(target=self._serve, name=self.name, daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def drop(self, fence: PolledFence, callback: Callable[[], None]) -> None:
        """Forget a callback that has not been called, once."""
        with self._lock:
            for wait in list(self._waits):
                if wait.fence is fence and wait.callback == callback:
                    self._waits.remove(wait)
                    return

    def stop(self) -> None:
        """Let the thread end once nothing waits."""
        with self._lock:
            self._stopped = True
            self._changed.notify_all()

    def join(self) -> None:
        """Wait for the end of the thread (blocks), unless this is that thread."""
        join_thread(self._thread)

    def _serve(self) -> None:
        while self._wait_for_work():
            call_all(self._take_those_that_are_over())

    def _wait_for_work(self) -> bool:
        with self._lock:
            while not self._waits:
                if self._stopped:
                    self._serving = False  # a later fence needs another thread; this one can still be joined
                    return False
                self._changed.wait()
            youngest = self._waits[-1].since
            self._changed.wait(pause_after(time.perf_counter() - youngest))
            return True

    def _take_those_that_are_over(self) -> list[Callable[[], None]]:
        with self._lock:
            over = [wait for wait in list(self._waits) if wait.fence.over()]
            # Asking may have run a finalizer, which has dropped one of them.
            over = [wait for wait in over if wait in self._waits]
            for wait in over:
                self._waits.remove(wait)
            return [wait.callback for wait in over]


class PolledFence(Fence):
    """A fence with a query, `done`. A thread of the device queries it while something waits."""

    def __init__(self, poller: FencePoller) -> None:
        """Wait by this poller."""
        self._poller = poller

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

    def notify(self, callback: Callable[[], None]) -> None:
        """Call back once, now or on the device's thread, also where work has failed: ask `done()` which it was."""
        if self.over():
            callback()
        else:
            self._poller.add(self, callback)

    def forget(self, callback: Callable[[], None]) -> None:
        """Drop a callback that has not run."""
        self._poller.drop(self, callback)

    def __await__(self) -> Generator[object, object, None]:
        """Wait on asyncio, uvloop or trio. Cancelling changes nothing on the device and leaves nothing behind.

        Raises:
            DeviceError: As `done`.
        """
        yield from super().__await__()
        self.done()

    def over(self) -> bool:
        """Return whether there is nothing left to wait for: the point is reached, or never will be."""
        try:
            return self.done()
        except DeviceError:
            return True


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
