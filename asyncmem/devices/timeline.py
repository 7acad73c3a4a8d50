"""When the simulated device's streams will have done what was submitted, and what order that is in.

Fences are recorded before they are waited for, so each completion time is known at submission: a stream is one number,
and no event queue is needed to run the device.
"""

import math
import threading
from collections.abc import Iterable

from asyncmem.devices.clock import Clock
from asyncmem.devices.order import Moment, OrderChecker
from asyncmem.errors import InvalidRequest

Range = tuple[int, int]
"""An address and a number of bytes."""


class Timeline:
    """The work of all streams of one device. Safe for threads."""

    def __init__(self, clock: Clock, checker: OrderChecker | None) -> None:
        """Use `clock` for times and `checker`, if any, for order."""
        self.clock = clock
        # Re-entrant: a finalizer may interrupt the holder on the same thread and ask for a fence.
        self.lock = threading.RLock()
        self._checker = checker
        self._ready_at: dict[int, float] = {}

    def add_stream(self, stream: int, name: str) -> None:
        """Begin a stream, which is idle."""
        with self.lock:
            self._ready_at[stream] = 0.0
            if self._checker is not None:
                self._checker.add_stream(stream, name)

    def submit(self, stream: int, duration: float, reads: Iterable[Range] = (), writes: Iterable[Range] = ()) -> None:
        """Queue work of `duration` seconds.

        Raises:
            StreamOrderError: It touches what another stream may be using, or what is not there.
        """
        if not duration >= 0:
            raise InvalidRequest("duration", duration, "seconds from 0 on")
        with self.lock:
            if self._checker is not None:
                self._touch(self._checker, stream, reads, writes)
            self._ready_at[stream] = max(self.clock.now(), self._ready_at[stream]) + duration

    def record(self, stream: int) -> tuple[float, Moment]:
        """Return when all work submitted to `stream` is done, and what is certain by then."""
        with self.lock:
            return self._ready_at[stream], {} if self._checker is None else self._checker.record(stream)

    def record_all(self) -> tuple[float, Moment]:
        """Return the same of all streams together."""
        with self.lock:
            moment = {} if self._checker is None else self._checker.record_all()
            return max(self._ready_at.values()), moment

    def wait(self, stream: int, at: float, moment: Moment) -> None:
        """Order the later work of `stream` behind a fence."""
        with self.lock:
            self._ready_at[stream] = max(self._ready_at[stream], at)
            if self._checker is not None:
                self._checker.wait(stream, moment)

    def look(self, at: float, moment: Moment) -> bool:
        """Tell the host whether a fence is reached, which orders what it submits from then on."""
        if self.clock.now() < at:
            return False
        if self._checker is not None:
            with self.lock:
                self._checker.seen(moment)
        return True

    def map(self, address: int, nbytes: int, stream: int | None) -> None:
        """Begin a segment, usable in the order of `stream` if there is one."""
        with self.lock:
            if self._checker is not None:
                self._checker.map(address, nbytes, stream)

    def unmap(self, address: int, nbytes: int) -> None:
        """End a segment.

        Raises:
            StreamOrderError: The host has not seen all work on it done.
        """
        with self.lock:
            if self._checker is not None:
                self._checker.unmap(address, nbytes)

    def idle_at(self) -> float:
        """Return when all work that ends will have ended."""
        with self.lock:
            return max((at for at in self._ready_at.values() if at < math.inf), default=0.0)

    @staticmethod
    def _touch(checker: OrderChecker, stream: int, reads: Iterable[Range], writes: Iterable[Range]) -> None:
        checker.begin(stream)
        for address, nbytes in reads:
            checker.touch(stream, address, nbytes, write=False)
        for address, nbytes in writes:
            checker.touch(stream, address, nbytes, write=True)
