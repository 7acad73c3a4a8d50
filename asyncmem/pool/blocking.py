"""Synchronous callers: they carry out by themselves what their request needs, or block their own thread.

torch, CuPy and plain threads cannot await. Their requests stand in the same queue as everybody's, so they barge past
nobody; only the errands are theirs, because a thread that calls may block and need not wait for the worker.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from asyncmem.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Callable

    from asyncmem.core import Batch, Buffer
    from asyncmem.pool.flow import Flow
    from asyncmem.pool.waiting import Waiting

    Errand = Callable[[], None]

_LOOK_AGAIN = 0.05  # seconds; whoever stands by is woken when an errand ends, but not by somebody's free


class BlockingCalls:
    """The way of a request whose caller does not await."""

    def __init__(self, flow: Flow) -> None:
        self._flow = flow
        self._standing_by: list[ThreadSleeper] = []

    def allow(self, waiting: Waiting) -> None:
        """Refuse to block an event loop's thread until a deadline."""
        if waiting.timeout and waiting.home is not None:
            raise InvalidRequest(
                "timeout", waiting.timeout, "0 or None on an event loop's thread", hint="await allocate_async instead"
            )

    def serve(self, waiting: Waiting) -> Buffer | Batch:
        """Serve a call at once, with whatever errands that takes, or block this thread until its deadline.

        Raises:
            OutOfMemoryError: There is no memory now, and the call has no deadline.
            PoolTimeout: There was none until the deadline.
        """
        waiting.inline = True
        try:
            self._flow.ask(waiting)
            self._see_through(waiting)
        except BaseException:  # an interrupt, or an error of the user's `on_oom`: nobody would provide for it any more
            with self._flow.turn:
                self._flow.withdraw(waiting, None)
                self.errand_ended()
            raise
        if waiting.error is not None:
            raise waiting.error
        result, waiting.result = waiting.result, None
        assert result is not None
        return result

    def _see_through(self, waiting: Waiting) -> None:
        while not waiting.done:
            if waiting.overdue:
                waiting.expire()
                return
            errand = self._errand(waiting)
            if isinstance(errand, ThreadSleeper):
                errand.sleep(_LOOK_AGAIN if waiting.remaining is None else min(waiting.remaining, _LOOK_AGAIN))
            elif errand is None and waiting.timeout:
                self._block(waiting)
                return
            elif errand is not _nothing:
                self._run(waiting, errand or self._flow.ladder.last_errand(waiting))

    def errand_ended(self) -> None:
        """Let those look again who stood behind a request that somebody was providing for (with the turn held)."""
        woken, self._standing_by = self._standing_by, []
        for sleeper in woken:
            sleeper.wake()

    def _errand(self, waiting: Waiting) -> Errand | ThreadSleeper | None:
        flow = self._flow
        with flow.turn:
            head = flow.queue.head()
            if waiting.done or flow.ladder.flush_for(waiting):
                return self._done_at_once()
            if head is not waiting:
                return self._behind(head, waiting)
            # On a loop's thread growth would hold the loop: there everything else comes first.
            enough = flow.supply.should_tidy(waiting, first=waiting.home is not None)
            tidied = enough and flow.ladder.tidy()
            errand = None if tidied else flow.ladder.grow_for(waiting)
            flow.set_gates()
            if tidied or (errand is None and (flow.ladder.tidy() or flow.ladder.press(waiting))):
                return self._done_at_once()
            errand = errand or flow.ladder.make_room_for(waiting)
            # What others give back to the device makes room for growth; only a thread of its own may wait for that.
            if errand is None and waiting.timeout is None and waiting.home is None and flow.supply.returning:
                return self._stand_by()
            return errand or flow.ladder.spill_for(waiting) or flow.errand_without_hope(waiting)

    def _done_at_once(self) -> Errand:
        # The queue is looked at before the turn ends, and whoever stands behind this one looks again then.
        self._flow.changed()
        self.errand_ended()
        return _nothing

    def _behind(self, head: Waiting | None, waiting: Waiting) -> Errand | ThreadSleeper | None:
        flow = self._flow
        # Memory is on its way to somebody before it, and what comes next may be its own: no time to fail yet.
        if flow.busy or (head is not None and head.inline):
            return self._stand_by()
        queue = waiting.queue
        growth = flow.ladder.grow_for(waiting) if queue is flow.queue and flow.may_grow_behind(waiting) else None
        may_be_next = queue.head() is waiting or queue.may_overtake(waiting)
        return growth or (flow.ladder.spill_for(waiting) if may_be_next else None)

    def _stand_by(self) -> ThreadSleeper:
        sleeper = ThreadSleeper()
        self._standing_by.append(sleeper)
        return sleeper

    def _run(self, waiting: Waiting, errand: Errand) -> None:
        if waiting.home is not None:
            self._flow.tally.loop_blocking_calls += 1
        try:
            errand()
        finally:
            with self._flow.turn:
                self._flow.changed()
                self.errand_ended()

    def _block(self, waiting: Waiting) -> None:
        sleeper = ThreadSleeper()
        with self._flow.turn:
            waiting.inline = False  # from here on the worker provides for it
            self._flow.changed()
            self.errand_ended()
        if waiting.admit(sleeper):
            sleeper.sleep(waiting.remaining)
        waiting.expire()


class ThreadSleeper:
    """A thread that waits in `allocate(timeout=...)`."""

    def __init__(self) -> None:
        self._gate = threading.Semaphore(0)

    def wake(self) -> None:
        """Let the thread go on. From any thread."""
        self._gate.release()

    def sleep(self, timeout: float | None) -> None:
        """Block this thread until woken, or for `timeout` seconds."""
        self._gate.acquire(timeout=None if timeout is None else min(timeout, threading.TIMEOUT_MAX))


def _nothing() -> None:
    """Stand for an errand whose work was done while it was decided."""
