"""Time of the simulated device: its clock, and when its streams will have done what was submitted.

Fences are recorded before they are waited for, so each completion time is known at submission: a stream is one number,
and no event queue is needed to run the device.
"""

import heapq
import itertools
import math
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Final

from asyncmem.devices.awaiting import join_thread
from asyncmem.devices.base import Span
from asyncmem.devices.simulated.order import Moment, OrderChecker
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
        self._lock = threading.RLock()  # entered by itself: an interrupt could come between the condition and its lock
        self._changed = threading.Condition(self._lock)

    @abstractmethod
    def now(self) -> float:
        """Return the time."""

    @abstractmethod
    def spend(self, seconds: float) -> None:
        """Let the time pass that a driver call takes, on the caller's thread."""

    @abstractmethod
    def jump(self, until: float) -> None:
        """Let time pass until then."""

    def block(self, until: float, timeout: float | None) -> bool:
        """Let time pass until `until`; False if `timeout` seconds passed first.

        Raises:
            DeviceError: It would hang, because that is never.
        """
        if until == math.inf and timeout is None:
            advice = "the stream has work of infinite duration"
            raise DeviceError("block", code=-1, code_name="WORK_NEVER_ENDS", advice=advice)
        end = until if timeout is None else min(until, self.now() + timeout)
        self.jump(end)
        return until <= end

    def call_at(self, when: float, callback: Callable[[], None]) -> None:
        """Call back at a time to come; never, if that is infinite."""
        if when < math.inf:
            with self._lock:
                heapq.heappush(self._alarms, (when, next(self._numbers), callback))

    @abstractmethod
    def close(self) -> None:
        """End what the clock has running, after the alarms that are set (blocks)."""

    def _next_due(self, by: float) -> tuple[float, Callable[[], None]] | None:
        with self._lock:
            if not self._alarms or self._alarms[0][0] > by:
                return None
            when, _, callback = heapq.heappop(self._alarms)
            return when, callback


class VirtualClock(Clock):
    """Time that stands still until a driver call, a blocking wait or `jump` moves it, so that each run is the same."""

    def __init__(self, autojump: bool) -> None:
        """With `autojump`, a wait moves the time itself; else it blocks until the time has been moved."""
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
        if self.autojump or (until == math.inf and timeout is None):
            return super().block(until, timeout)
        with self._lock:
            return self._changed.wait_for(lambda: self._now >= until, timeout)

    def close(self) -> None:
        """Do nothing: nothing runs."""

    def _reach(self, when: float) -> None:
        with self._lock:
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

    def jump(self, until: float) -> None:
        """Sleep until then."""
        time.sleep(max(0.0, until - self.now()))

    def call_at(self, when: float, callback: Callable[[], None]) -> None:
        """Call back on the alarm thread."""
        super().call_at(when, callback)
        with self._lock:
            self._changed.notify_all()
            if self._alarms and self._thread is None:
                self._thread = threading.Thread(target=self._ring, name="asyncmem simulated clock", daemon=True)
                self._thread.start()

    def close(self) -> None:
        """Wait for the alarms that are set (blocks)."""
        join_thread(self._thread)

    def _ring(self) -> None:
        while self._wait_for_alarm():
            while (alarm := self._next_due(self.now())) is not None:
                alarm[1]()

    def _wait_for_alarm(self) -> bool:
        with self._lock:
            if not self._alarms:
                self._thread = None
                return False
            self._changed.wait(max(0.0, self._alarms[0][0] - self.now()))
            return True


class Timeline:
    """The work of all streams of one device. Safe for threads."""

    def __init__(self, clock: Clock, checker: OrderChecker) -> None:
        """Use `clock` for times and `checker` for order."""
        self.clock = clock
        # Re-entrant: a finalizer may interrupt the holder on the same thread and ask for a fence.
        self.lock = threading.RLock()
        self.checker = checker
        self._ready_at: dict[int, float] = {}

    def add_stream(self, stream: int, name: str) -> None:
        """Begin a stream, which is idle."""
        with self.lock:
            self._ready_at[stream] = 0.0
            self.checker.add_stream(stream, name)

    def submit(self, stream: int, duration: float, reads: Iterable[Span] = (), writes: Iterable[Span] = ()) -> None:
        """Queue work of `duration` seconds.

        Raises:
            StreamOrderError: It touches what another stream may be using, or what is not there.
        """
        check_seconds("duration", duration)
        with self.lock:
            self.checker.begin(stream)
            for address, nbytes in reads:
                self.checker.touch(stream, address, nbytes, write=False)
            for address, nbytes in writes:
                self.checker.touch(stream, address, nbytes, write=True)
            self._ready_at[stream] = max(self.clock.now(), self._ready_at[stream]) + duration

    def record(self, stream: int) -> tuple[float, Moment]:
        """Return when all work submitted to `stream` is done, and what is certain by then."""
        with self.lock:
            return self._ready_at[stream], self.checker.record(stream)

    def record_all(self) -> tuple[float, Moment]:
        """Return the same of all streams together."""
        with self.lock:
            return max(self._ready_at.values()), self.checker.record_all()

    def wait(self, stream: int, at: float, moment: Moment) -> None:
        """Order the later work of `stream` behind a fence."""
        with self.lock:
            self._ready_at[stream] = max(self._ready_at[stream], at)
            self.checker.wait(stream, moment)

    def look(self, at: float, moment: Moment) -> bool:
        """Tell the host whether a fence is reached, which orders what it submits from then on."""
        if self.clock.now() < at:
            return False
        with self.lock:
            self.checker.seen(moment)
        return True

    def idle_at(self) -> float:
        """Return when all work that ends will have ended."""
        with self.lock:
            return max((at for at in self._ready_at.values() if at < math.inf), default=0.0)


def check_seconds(what: str, value: float) -> None:
    """Refuse what is no time.

    Raises:
        InvalidRequest: It is negative, or no number.
    """
    try:
        right = value >= 0
    except TypeError:
        right = False
    if not right:
        raise InvalidRequest(what, value, "seconds from 0 on")
