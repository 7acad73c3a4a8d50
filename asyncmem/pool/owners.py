"""Who holds memory and waits for more: tasks and threads, by the core's numbers and by name."""

from __future__ import annotations

import threading
from contextvars import ContextVar
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from asyncmem.core import Core

named_owner: ContextVar[str | None] = ContextVar("asyncmem_owner", default=None)
"""The name of `pool.owner(name)`; what is allocated under it is held by the task that allocates it."""


def label(owner: object) -> str:
    """Return an owner's name, for people: of a task, a thread's number, or a name that the program gave."""
    if owner is None:
        return "nobody"
    if isinstance(owner, str):
        return owner
    if isinstance(owner, int):
        return next((f"thread {one.name}" for one in threading.enumerate() if one.ident == owner), f"thread {owner}")
    get_name = getattr(owner, "get_name", None)
    return f"task {get_name() if callable(get_name) else getattr(owner, 'name', owner)}"


def held_by(core: Core) -> dict[int, int]:
    """Return the bytes that each owner holds, by number; 0 is nobody who is still there."""
    held: dict[int, int] = {}
    for owner, block in core.scheduler.holds():
        held[owner] = held.get(owner, 0) + core.size(block)
    return held
