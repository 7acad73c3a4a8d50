"""Who holds how much until a block ends: what the deadlock detector may count on.

Memory counts as held only where the program says so: entered by ``with`` or ``async with``, taken as a lease, or
allocated inside ``with pool.owner(name)``. A buffer that merely sits in a queue or in a variable is nobody's.

An owner is a task, a thread's number, or an `OwnerName`.
"""

from __future__ import annotations

import threading
from contextvars import ContextVar
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping

    from asyncmem.pool.home import Home


class OwnerName(str):
    """A name that the program gave: whoever runs under it is one owner."""

    __slots__ = ()


named_owner: ContextVar[OwnerName | None] = ContextVar("asyncmem_owner", default=None)


def current_owner(home: Home | None) -> Hashable:
    """Answer who runs now: the innermost name, else the current task, else the thread."""
    name = named_owner.get()
    if name is not None:
        return name
    task = home.current_task() if home is not None else None
    return threading.get_ident() if task is None else task


def label(owner: Hashable) -> str:
    """Answer an owner's name, for people."""
    if owner is None:
        return "nobody yet"
    if isinstance(owner, str):
        return str(owner)
    if isinstance(owner, int):
        return next((f"thread {one.name}" for one in threading.enumerate() if one.ident == owner), f"thread {owner}")
    get_name = getattr(owner, "get_name", None)
    return f"task {get_name() if callable(get_name) else getattr(owner, 'name', owner)}"


class Holdings:
    """What is held, by owner: addresses and bytes. Changed under the pool's turn only."""

    def __init__(self) -> None:
        self._held: dict[Hashable, list[tuple[int, int]]] = {}

    def __len__(self) -> int:
        return len(self._held)

    def hold(self, owner: Hashable, place: tuple[int, int]) -> None:
        """Count a range (address, bytes) as held by an owner until `release`."""
        self._held.setdefault(owner, []).append(place)

    def release(self, owner: Hashable, place: tuple[int, int]) -> None:
        """Undo one `hold`."""
        places = self._held[owner]
        places.remove(place)
        if not places:
            del self._held[owner]

    def of(self, owner: Hashable) -> int:
        """Answer the bytes that an owner holds."""
        return sum(nbytes for _, nbytes in self._held.get(owner, ()))

    def table(self) -> Mapping[Hashable, list[tuple[int, int]]]:
        """Answer what everybody holds."""
        return self._held
