"""What is noted on a buffer beside its memory: which other streams use it, its captured graph, where it was made.

Most buffers have no notes, and cost nothing for it; one that has them is freed by the pool's slower way.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from asyncmem.core import Users

if TYPE_CHECKING:
    from asyncmem.core import Buffer
    from asyncmem.pool.graph import GraphMemory


class Notes(Users):
    """The notes of one buffer, beside the streams that use it besides its home (by number, in `users`).

    Attributes:
        graph: The captured graph that its memory stays with, or None.
        site: "file:line" where it was asked for, when tracking is on.
        checked: Whether a memory checker knows of it.
    """

    __slots__ = ("checked", "graph", "site")

    def __init__(self, site: str | None = None) -> None:
        self.graph: GraphMemory | None = None
        self.site = site
        self.checked = False


def notes_of(buffer: Buffer) -> Notes:
    """Return a buffer's notes, new ones at first."""
    noted = buffer.notes
    if isinstance(noted, Notes):
        return noted
    notes = Notes()
    if isinstance(noted, Users):  # the core notes streams by itself
        for index in noted.users:
            notes.add_user(index)
    buffer.notes = notes
    return notes
