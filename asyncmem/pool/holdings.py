"""Who holds how much until a block ends: what the deadlock detector may count on.

Memory counts as held only where the program says so: entered by ``with`` or ``async with``, taken as a lease, or
allocated inside ``with pool.owner(name)``. A buffer that merely sits in a queue or in a variable is nobody's.
"""

from __future__ import annotations

import threading
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Hashable

    from asyncmem.pool.home import Home


@dataclass(frozen=True, slots=True)
class Owner:
    """Somebody who holds and waits: a task, a thread, or a name given by the program."""

    key: Hashable
    label: str

    def __str__(self) -> str:
        return self.label


named_owner: ContextVar[Owner | None] = ContextVar("asyncmem_owner", default=None)


def current_owner(home: Home | None) -> Owner:
    """Answer who runs now: the innermost name, else the current task, else the thread."""
    named = named_owner.get()
    if named is not None:
        return named
    task = home.current_task() if home is not None else None
    if task is None:
        thread = threading.current_thread()
        return Owner(thread.ident, f"thread {thread.name}")
    get_name = getattr(task, "get_name", None)
    label = get_name() if callable(get_name) else getattr(task, "name", repr(task))
    return Owner(task, f"task {label}")


class Holdings:
    """Bytes held by owner. Changed under the pool's turn only."""

    def __init__(self) -> None:
        self._held: dict[Owner, int] = {}

    def hold(self, owner: Owner, nbytes: int) -> None:
        """Count bytes as held by an owner until `release`."""
        self._held[owner] = self._held.get(owner, 0) + nbytes

    def release(self, owner: Owner, nbytes: int) -> None:
        """Undo one `hold`."""
        left = self._held.get(owner, 0) - nbytes
        if left > 0:
            self._held[owner] = left
        else:
            self._held.pop(owner, None)

    def of(self, owner: Owner) -> int:
        """Answer the bytes that an owner holds."""
        return self._held.get(owner, 0)

    def table(self) -> dict[Hashable, int]:
        """Answer what everybody holds."""
        return dict(self._held.items())
