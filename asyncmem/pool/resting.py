"""Marked memory that nobody uses, by age, and how much of it would make room in which share."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from asyncmem.pool.movable import Movable
    from asyncmem.pool.share import Share


class Idle:
    """What may move, used the longest ago first. Changed under the pool's turn only."""

    def __init__(self) -> None:
        self._ones: dict[Movable, tuple[Share, ...]] = {}  # and where each makes room
        self._bytes: Counter[Share] = Counter()

    def __len__(self) -> int:
        return len(self._ones)

    def add(self, one: Movable, *, oldest: bool = False) -> None:
        """Put one in as the one used last, or as the oldest still; one that is here already stays where it is."""
        if one in self._ones:
            return
        if oldest:
            self._ones = {one: (), **self._ones}
        self._count(one)

    def discard(self, one: Movable) -> None:
        """Take one out, if it is here."""
        if one in self._ones:
            self._uncount(one)
            del self._ones[one]

    def pass_on(self, share: Share, heir: Share) -> None:
        """Charge to another share what is charged to this one; its age stays."""
        if self._bytes[share]:
            for one in [one for one in self.of(share) if one.share is share]:
                self._uncount(one)
                one.share = heir
                self._count(one)

    def bytes_of(self, share: Share) -> int:
        """Answer how much room all that may move would make in a share."""
        return self._bytes[share]

    def of(self, share: Share) -> Iterator[Movable]:
        """Go through those that would make room in a share."""
        return (one for one, shares in self._ones.items() if share in shares)

    def _count(self, one: Movable) -> None:
        self._ones[one] = shares = tuple(_served_by(one.share))
        for share in shares:
            self._bytes[share] += one.size

    def _uncount(self, one: Movable) -> None:
        for share in self._ones[one]:
            self._bytes[share] -= one.size
            if not self._bytes[share]:
                del self._bytes[share]


def _served_by(share: Share) -> Iterator[Share]:
    """Go through the shares that memory charged to this one would make room in: not in those around its range."""
    for one in share.lineage():
        if one._arena != share._arena:
            return
        yield one
