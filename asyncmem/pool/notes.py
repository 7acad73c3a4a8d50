"""What is noted on a buffer beside its memory: who holds it, which other streams use it, where it was made.

Most buffers have no notes, and cost nothing for it; one that has them is freed by the pool's slower way.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from asyncmem.core import Users

if TYPE_CHECKING:
    from collections.abc import Hashable

    from asyncmem.core import Buffer
    from asyncmem.pool.graph import GraphMemory
    from asyncmem.pool.share import Share

_PACKAGE = __name__.partition(".")[0]


class Notes(Users):
    """The notes of one buffer, beside the streams that use it besides its home (by number, in `users`).

    Attributes:
        owner: Who holds it until a block ends, or None.
        share: Where `owner` counts as its holder.
        place: Address and bytes that it holds.
        graph: The captured graph that its memory stays with, or None.
        site: "file:line" where it was asked for, when tracking is on.
    """

    __slots__ = ("graph", "owner", "place", "share", "site")

    def __init__(self, site: str | None = None) -> None:
        self.owner: Hashable = None
        self.graph: GraphMemory | None = None
        self.share: Share | None = None
        self.place = (0, 0)
        self.site = site

    def hold(self, share: Share, owner: Hashable, place: tuple[int, int]) -> None:
        """Count a range as held by an owner, in a share and whatever that is a part of (with the turn held)."""
        if place[1] == 0:
            return  # an empty buffer keeps nothing from anybody, and its end is told to nobody
        self.owner, self.share, self.place = owner, share, place
        for one in share.lineage():
            one.holdings.hold(owner, place)

    def let_go(self) -> None:
        """Undo `hold` (with the turn held)."""
        if self.owner is not None and self.share is not None:
            for one in self.share.lineage():
                one.holdings.release(self.owner, self.place)
        self.owner = None


def notes_of(buffer: Buffer) -> Notes:
    """Answer a buffer's notes, new ones at first."""
    noted = buffer.notes
    if isinstance(noted, Notes):
        return noted
    notes = Notes()
    if isinstance(noted, Users):  # the core notes streams by itself
        for index in noted.users:
            notes.add_user(index)
    buffer.notes = notes
    return notes


def call_site() -> str | None:
    """Answer "file:line" of the innermost caller outside of this package."""
    frame = sys._getframe(1)
    while frame.f_globals.get("__name__", "").partition(".")[0] == _PACKAGE:
        if frame.f_back is None:
            return None
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
