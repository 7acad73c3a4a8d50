"""Who is served next, once more in plain Python: the rules of the queue as one reads them, with no thought of speed.

Memory is a number of bytes here: it has no addresses, comes at once, and one piece of it is as good as another. So what
is left is the order of requests, the limits, and how far a small request may overtake one that does not fit.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

GRANULE: Final = 512


@dataclass(eq=False)
class ReferenceShare:
    """A pool or a budget."""

    limit: int
    bypass: float
    up: ReferenceShare | None = None
    live: int = 0
    overtaken: int = 0
    """Bytes that were granted past a request which did not fit here."""
    path: list[ReferenceShare] = field(init=False)
    """This one and those around it, innermost first."""

    def __post_init__(self) -> None:
        self.path = [self, *(self.up.path if self.up else [])]


@dataclass(eq=False)
class ReferenceRequest:
    """A request that has not ended."""

    name: int
    share: ReferenceShare
    nbytes: int
    place: tuple[int, int, int]
    """Bytes that were queued up to it, less its bonus; then priority; then arrival."""
    overtaken: dict[ReferenceShare, int] = field(default_factory=dict)
    """What each share on its way had let pass when it came."""


class ReferenceScheduler:
    """Serves requests in order, and lists their names as they are served."""

    def __init__(self, limit: int, bypass: float) -> None:
        self.root = ReferenceShare(limit, bypass)
        self.waiting: list[ReferenceRequest] = []
        self.served: list[int] = []
        self.refused: list[int] = []
        self._queued = 0
        self._arrivals = 0

    # -- events --------------------------------------------------------------------------------------------------------

    def open_share(self, limit: int, up: ReferenceShare) -> ReferenceShare:
        """Make a budget."""
        return ReferenceShare(limit, self.root.bypass, up)

    def submit(self, name: int, share: ReferenceShare, nbytes: int, priority: int = 0) -> None:
        """Take a request in."""
        total = -(-nbytes // GRANULE) * GRANULE
        if any(total > one.limit for one in share.path):
            self.refused.append(name)
            return
        self._queued += total
        self._arrivals += 1
        bonus = int(0.5 * self.root.bypass * self.root.limit * priority)
        request = ReferenceRequest(name, share, total, (self._queued - bonus, -priority, self._arrivals))
        request.overtaken = {one: one.overtaken for one in share.path}
        self.waiting.append(request)
        self._serve()

    def free(self, share: ReferenceShare, nbytes: int) -> None:
        """Take memory back."""
        for one in share.path:
            one.live -= -(-nbytes // GRANULE) * GRANULE
        self._serve()

    def cancel(self, name: int) -> None:
        """Forget a request that waits."""
        self.waiting = [one for one in self.waiting if one.name != name]
        self._serve()

    def set_limit(self, share: ReferenceShare, limit: int) -> None:
        """Change a limit; requests above it are refused."""
        share.limit = limit
        for request in [one for one in self.waiting if one.nbytes > limit and share in one.share.path]:
            self.refused.append(request.name)
            self.waiting.remove(request)
        self._serve()

    # -- rules ---------------------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        while passing := [one for one in self.waiting if self._passes(one, self.root)]:
            request = min(passing, key=lambda one: one.place)
            for share in request.share.path:
                head = self._head(share)
                if head is not None and head is not request and head.place < request.place:
                    share.overtaken += request.nbytes
            self.waiting.remove(request)
            for share in request.share.path:
                share.live += request.nbytes
            self.served.append(request.name)

    def _head(self, share: ReferenceShare) -> ReferenceRequest | None:
        """Return the first request that has come as far as a share: all budgets inside of it let it pass."""
        there = [one for one in self.waiting if share in one.share.path and self._comes_to(one, share)]
        return min(there, key=lambda one: one.place, default=None)

    def _comes_to(self, request: ReferenceRequest, share: ReferenceShare) -> bool:
        path = request.share.path
        return all(self._is_let_pass(request, inside) for inside in path[: path.index(share)])

    def _passes(self, request: ReferenceRequest, share: ReferenceShare) -> bool:
        return self._comes_to(request, share) and self._is_let_pass(request, share)

    def _is_let_pass(self, request: ReferenceRequest, share: ReferenceShare) -> bool:
        """Return whether it fits here, and passes the first one as far as that may be overtaken."""
        room = share.limit - share.live
        head = self._head(share)
        assert head is not None
        if head.nbytes > room and head is not request:
            room = min(room, self._allowance(share, head))
        return request.nbytes <= room

    def _allowance(self, share: ReferenceShare, head: ReferenceRequest) -> int:
        """Return the bytes that may yet be granted past a request."""
        return max(0, int(share.bypass * share.limit) - (share.overtaken - head.overtaken[share]))
