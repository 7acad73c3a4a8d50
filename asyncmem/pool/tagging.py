"""`tag`: a name for all that is allocated inside a block, seen while somebody records."""

from __future__ import annotations

from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING

from asyncmem.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Iterator

current_tag: ContextVar[str | None] = ContextVar("asyncmem_tag", default=None)


@contextmanager
def tag(name: str) -> Iterator[None]:
    """Name what is allocated inside the block: ``with asyncmem.tag("attention"):``.

    The name follows the tasks that are made inside. The innermost block counts, and ``tag=`` of a request more than any
    block. Recordings, trackers and the errors of a pool that is recorded show it; a pool that nobody records does not
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
