"""Whom marked memory moves for: the next of each queue, those behind who may overtake it, and requests to leases."""

from __future__ import annotations

from typing import TYPE_CHECKING

from asyncmem.engine.admit import Queue

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from asyncmem.pool.flow import Flow
    from asyncmem.pool.waiting import Waiting

    Errand = Callable[[], None]


class Relief:
    """What moving memory does for one pool's requests. All methods are called with the turn held.

    Attributes:
        inside: Requests to leases, which wait for nothing but such a move.
    """

    def __init__(self, flow: Flow) -> None:
        self._flow = flow
        self.inside: Queue[Waiting] = Queue(0)

    def take_in(self, waiting: Waiting) -> bool:
        """Let a request to a lease wait, if memory of the lease may move for it."""
        promising = self._promises(waiting)
        if promising:
            for tally in waiting.tallies():
                tally.waits += 1
            self.inside.join(waiting)
        return promising

    def errand(self) -> Errand | None:
        """Answer the errand that moves memory for the first whom that serves, or None.

        Where the head of a queue is beyond help, that is somebody behind, who might hold what the head waits for.
        """
        for waiting in self._next_ones():
            errand = None if waiting.inline else self._flow.ladder.spill_for(waiting)
            if errand is not None:
                return errand
        return None

    def beyond(self) -> list[Waiting]:
        """Answer the requests to leases that nothing moves for any more."""
        return [one for one in self.inside if not (one.inline or self._flow.busy or self._promises(one))]

    def _next_ones(self) -> Iterator[Waiting]:
        yield from self.inside
        for share in (self._flow.pool, *self._flow.standing):
            head = share.queue.head()
            if head is not None and not head.inline:
                yield head
                yield from share.queue.behind(head, share.own_limit())

    def _promises(self, waiting: Waiting) -> bool:
        if waiting.capture is not None:
            return False
        share = waiting.share.held_up_at(waiting)
        return self._flow.spilling.could_free(share.shortage(waiting.total), share)
