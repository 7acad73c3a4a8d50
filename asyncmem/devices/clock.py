"""Time of the simulated device: virtual, which moves only when told, or the wall's."""

import heapq
import itertools
import math
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Final

from asyncmem.errors import DeviceError, InvalidRequest

# A sleep takes some 50 us at least, so cheap calls would be made dear by it; they cost Python more than they claim.
_SHORTEST_SLEEP: Final = 20e-6


class Clock(ABC):
    """Tells the time in seconds since it began, lets it pass, and rings at set times."""

    def __init__(self) -> None:
        """Start at 0."""
        self._alarms: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        # Re-entrant: a finalizer may interrupt the holder on the same thread and call the device.
        self._changed = threading.Condition(threading.RLock())

    @abstractmethod
    def now(self) -> float:
        """Return the time."""

    @abstractmethod
    def spend(self, seconds: float) -> None:
        """Let the time pass that a driver call takes, on the caller's thread."""

    @abstractmethod
    def block(self, until: float, timeout: float | None) -> bool:
        """Let time pass until `until`; False if `timeout` seconds passed first."""

    def call_at(self, when: float, callback: Callable[[], None]) -> None:
        """Call back at a time to come; never, if that is infinite."""
        if when < math.inf:
            with self._changed:
                heapq.heappush(self._alarms, (when, next(self._numbers), callback))

    @abstractmethod
    def close(self) -> None:
        """End what the clock has running, after the alarms that are set (blocks)."""

    def _next_due(self, by: float) -> tuple[float, Callable[[], None]] | None:
        with self._changed:
            if not self._alarms or self._alarms[0][0] > by:
                return None
            when, _, callback = heapq.heappop(self._alarms)
            return when, callback


class VirtualClock(Clock):
    """Time that stands still until a driver call, a blocking wait or `jump` moves it, so that each run is the same."""

    def __init__(self, autojump: bool) -> None:
        """With `autojump`, a wait moves the time itself; else it is held until somebody else has."""
        super().__init__()
        self._now = 0.0
        self.autojump = autojump

    def now(self) -> float:
        """Return the virtual time."""
        return self._now

    def spend(self, seconds: float) -> None:
        """Move the time on."""
        if seconds:
            self.jump(self._now + seconds)

    def jump(self, until: float) -> None:
        """Move the time to `until`, ringing on the way, each alarm at its own time and on this thread."""
        while (alarm := self._next_due(until)) is not None:
            self._reach(alarm[0])
            alarm[1]()
        self._reach(until)

    def block(self, until: float, timeout: float | None) -> bool:
        """Jump, or wait until others have moved the time far enough; only then is `timeout` in real seconds."""
        if until == math.inf and timeout is None:
            raise never_ends()
        if not self.autojump:
            with self._changed:
                return self._changed.wait_for(lambda: self._now >= until, timeout)
        end = until if timeout is None else min(until, self._now + timeout)
        self.jump(end)
        return until <= end

    def close(self) -> None:
        """Do nothing: nothing runs."""

    def _reach(self, when: float) -> None:
        with self._changed:
            self._now = max(self._now, when)
            self._changed.notify_all()


class WallClock(Clock):
    """Real time. Alarms ring on a thread that lives while there are any."""

    def __init__(self) -> None:
        """Start now."""
        super().__init__()
        self._start = time.monotonic()
        self._thread: threading.Thread | None = None

    def now(self) -> float:
        """Return the seconds since the start."""
        return time.monotonic() - self._start

    def spend(self, seconds: float) -> None:
        """Really take the time, if it is long enough to be felt."""
        if seconds >= _SHORTEST_SLEEP:
            time.sleep(seconds)

    def block(self, until: float, timeout: float | None) -> bool:
        """Sleep."""
        if until == math.inf and timeout is None:
            raise never_ends()
        end = until if timeout is None else min(until, self.now() + timeout)
        time.sleep(max(0.0, end - self.now()))
        return until <= end

    def call_at(self, when: float, callback: Callable[[], None]) -> None:
        """Call back on the alarm thread."""
        super().call_at(when, callback)
        with self._changed:
            self._changed.notify_all()
            if self._alarms and self._thread is None:
                self._thread = threading.Thread(target=self._ring, name="asyncmem simulated clock", daemon=True)
                self._thread.start()

    def close(self) -> None:
        """Wait for the alarms that are set (blocks)."""
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _ring(self) -> None:
        while self._wait_for_alarm():
            while (alarm := self._next_due(self.now())) is not None:
                alarm[1]()

    def _wait_for_alarm(self) -> bool:
        with self._changed:
            if not self._alarms:
                self._thread = None
                return False
            self._changed.wait(max(0.0, self._alarms[0][0] - self.now()))
            return True


def make_clock(kind: str, *, autojump: bool) -> Clock:
    """Return the clock of that kind, "virtual" or "wall"."""
    if kind == "virtual":
        return VirtualClock(autojump)
    if kind == "wall":
        return WallClock()
    raise InvalidRequest("clock", kind, "'virtual' or 'wall'")


def never_ends() -> DeviceError:
    """Return the error of a wait that could only hang."""
    return DeviceError("block", code=-1, code_name="WORK_NEVER_ENDS", advice="the stream has work of infinite duration")
