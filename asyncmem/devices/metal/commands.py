"""A queue of Metal: what it was given and has not ended, in order, and what of it has failed.

Metal lets go of work that fails without a word: what it should have signalled stays unsignalled, for ever, and other
queues may be waiting for it. So all that is given to a queue here is remembered until somebody has seen it end.
"""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from asyncmem.devices.metal.api import COMPLETED, FAILED
from asyncmem.errors import DeviceError

if TYPE_CHECKING:
    from collections.abc import Callable

    from asyncmem.devices.metal.api import MTLCommandBuffer, MTLCommandQueue, MTLSharedEvent
    from asyncmem.devices.metal.driver import Driver
    from asyncmem.devices.metal.fence import MetalFence


@dataclass(slots=True, eq=False)
class Given:
    """One command buffer that was handed in."""

    position: int
    work: MTLCommandBuffer
    behind: tuple[MetalFence, ...]
    signals: int
    """What it sets the queue's event to, or 0."""


@dataclass(slots=True)
class _Failure:
    first: int
    last: int
    """Up to where it concerns whoever asks; 0 while nobody has been told."""
    code: int
    words: str


class Commands:
    """Hands work in, and tells how far the queue is.

    Attributes:
        queue: Where it goes.
        event: What later work of other queues waits for.
    """

    def __init__(self, driver: Driver, queue: MTLCommandQueue, event: MTLSharedEvent) -> None:
        """Begin with nothing handed in."""
        self.queue = queue
        self.event = event
        self._driver = driver
        self._open: deque[Given] = deque()
        self._given = 0
        self._ended = 0
        self._marks = 0
        self._failures: list[_Failure] = []
        # Re-entrant: a finalizer may interrupt the holder on the same thread and record here.
        self._lock = threading.RLock()

    def give(self, encode: Callable[[MTLCommandBuffer], None]) -> None:
        """Hand in what `encode` writes.

        Raises:
            DeviceError: Metal fails; nothing has been handed in then.
        """
        with self._driver.pool():
            work = self._begin()
            encode(work)
            with self._lock:
                self._commit(work)

    def hold(self, *behind: MetalFence) -> None:
        """Let nothing run that is handed in from now on, by whomever, before these fences are reached.

        Raises:
            DeviceError: Metal fails; nothing is held then.
        """
        with self._driver.pool():
            work = self._begin()
            for fence in behind:
                self._driver.call(work.encodeWaitForEvent_value_, fence.event, fence.value)
            with self._lock:
                self._commit(work, behind=behind)

    def mark(self) -> Given:
        """Have the event signalled behind all that was handed in so far, by whomever.

        Raises:
            DeviceError: Metal fails.
        """
        with self._driver.pool():
            work = self._begin()
            with self._lock:
                # Others wait for a value and more, so no later value may be signalled before this one.
                self._marks += 1
                self._driver.call(work.encodeSignalEvent_value_, self.event, self._marks)
                return self._commit(work, signals=self._marks)

    def over(self, position: int) -> bool:
        """Tell whether everything up to there has ended, in whatever way."""
        # What has ended is asked for no more: its queue may by now wait for one that waits for this point.
        if self._ended < position:
            self._look()
        return self._ended >= position

    def reached(self, position: int) -> bool:
        """Tell whether everything up to there has ended.

        Raises:
            DeviceError: It has, and some of it has failed, or of what it was behind; everybody is told who asks for
                what was handed in before the first was told.
        """
        if not self.over(position):
            return False
        for failure in self._failures:
            if failure.first <= position <= (failure.last or position):
                failure.last = failure.last or self._given
                raise self._driver.failure("MTLCommandBuffer", failure.code, failure.words)
        return True

    def _begin(self) -> MTLCommandBuffer:
        # Also for those who hand in and never ask.
        self._look()
        return self._driver.get(self.queue.commandBuffer)

    def _commit(self, work: MTLCommandBuffer, *, behind: tuple[MetalFence, ...] = (), signals: int = 0) -> Given:
        self._driver.call(work.commit)
        self._given += 1
        given = Given(self._given, work, behind, signals)
        self._open.append(given)
        return given

    def _look(self) -> None:
        """Strike off what has ended. No lock is held while others are asked, whose queues may wait for this one."""
        while True:
            try:
                first = self._open[0]
            except IndexError:
                return
            status = self._driver.call(first.work.status)
            # Asked in any case: were one of these to fail, its queue would have to be told.
            waits = [fence for fence in first.behind if not fence.over()]
            if status not in (COMPLETED, FAILED) or waits:
                return
            with self._driver.pool():
                error = self._driver.failure_of(first.work) if status == FAILED else _error_before(first)
                self._strike_off(first, error)
                del first

    def _strike_off(self, first: Given, error: DeviceError | None) -> None:
        with self._lock:
            if not self._open or self._open[0] is not first:
                return  # another thread has
            if error is not None:
                self._failures.append(_Failure(first.position, 0, error.code, error.code_name))
                if first.signals:
                    self._driver.call(self.event.setSignaledValue_, max(first.signals, self.event.signaledValue()))
            self._open.popleft()
            self._ended = max(self._ended, first.position)


def _error_before(given: Given) -> DeviceError | None:
    """Answer what failed of that which it was behind, and so is a failure of what is behind it."""
    for fence in given.behind:
        try:
            fence.done()
        except DeviceError as error:
            return error
    return None
