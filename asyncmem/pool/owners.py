"""Owners: tasks and threads that hold memory and wait for more, by number and by name; and tags."""

from __future__ import annotations

import threading
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import TYPE_CHECKING

from asyncmem.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from asyncmem.core import Core

named_owner: ContextVar[str | None] = ContextVar("asyncmem_owner", default=None)
"""The name of `pool.owner(name)`; what is allocated under it is held by the task that allocates it."""


current_tag: ContextVar[str | None] = ContextVar("asyncmem_tag", default=None)
"""The name of `tag(name)`."""


@contextmanager
def tag(name: str) -> Iterator[None]:
    """Name what is allocated inside the block: ``with asyncmem.tag("attention"):``.

    The name follows the tasks that are made inside. The innermost block counts, and ``tag=`` of a request more than any
    block. Recordings, trackers and the errors of a pool that is recorded show it; a pool that is not recorded does not
    even look, and counts by ``tag=`` alone.

    Raises:
        InvalidRequest: The name is not text.
    """
    if not isinstance(name, str):
        raise InvalidRequest("tag()", name, "text")
    token = current_tag.set(name)
    try:
        yield
    finally:
        current_tag.reset(token)


def label(owner: object) -> str:
    """Return an owner's name, for people: of a task, a thread's number, or a name that the program gave."""
    if owner is None:
        return "no owner"
    if isinstance(owner, str):
        return owner
    if isinstance(owner, int):
        return next((f"thread {one.name}" for one in threading.enumerate() if one.ident == owner), f"thread {owner}")
    get_name = getattr(owner, "get_name", None)
    return f"task {get_name() if callable(get_name) else getattr(owner, 'name', owner)}"


def name_of(core: Core, number: int) -> str:
    """Return the name of the owner of that number, for people."""
    return label(core.named(number)) if number else "no owner yet"


def held_by(core: Core, accounts: Collection[int] | None = None) -> dict[int, int]:
    """Return the bytes that each owner holds, by number, in all or in some accounts; without those that are gone."""
    held: dict[int, int] = {}
    for owner, block in core.scheduler.holds():
        with suppress(ValueError):  # another thread has freed it since
            one = core.info(block)
            if owner and (accounts is None or one.account in accounts):
                held[owner] = held.get(owner, 0) + one.nbytes
    return held
