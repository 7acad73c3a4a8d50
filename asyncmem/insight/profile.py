"""`profile_memory`: what a block of a program does with a pool's memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self, final

from asyncmem.errors import InvalidRequest
from asyncmem.insight.entering import AroundPools
from asyncmem.insight.recording import KEEP, Recording
from asyncmem.insight.summary import summarize
from asyncmem.pool.snapshot import counters, since

if TYPE_CHECKING:
    from types import TracebackType

    from asyncmem.insight.records import Records
    from asyncmem.pool import AsyncMemoryPool
    from asyncmem.stats import PoolStats


def profile_memory(pool: AsyncMemoryPool, *, frames: int = 1, keep: int = KEEP) -> Profile:
    """Look at what a block does with a pool's memory, entered by ``with`` or ``async with``.

    Profiles may lie in one another, and beside recordings. While one is entered, an allocation and a free cost some
    tenths of a microsecond more.

    Args:
        pool: What to look at; the block opens it if it is not open yet.
        frames: How many lines of the call are kept of each request.
        keep: So many of the newest records are kept, 56 bytes each.
    """
    return Profile(pool, frames=frames, keep=keep)


@final
class Profile(AroundPools):
    """What a block has done with a pool's memory, or is doing. Made by `profile_memory`; any thread may read it."""

    def __init__(self, pool: AsyncMemoryPool, *, frames: int, keep: int) -> None:
        self._pool = pool
        self._pools = (pool,)
        self._recording = Recording(pool, frames=frames, keep=keep)
        self._before: PoolStats | None = None
        self._after: PoolStats | None = None

    def __repr__(self) -> str:
        return f"<asyncmem.insight.Profile of pool {self._pool.name!r}>"

    def __enter__(self) -> Self:
        """Begin.

        Raises:
            InvalidRequest: This profile was used before.
            PoolClosed: The pool is closed.
        """
        self._recording.__enter__()
        self._before = self._pool.stats()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End; what was seen is kept."""
        self._after = self._pool.stats()
        self._recording.__exit__(kind, error, trace)

    def _repr_mimebundle_(self, **_wanted: object) -> dict[str, str]:
        """Answer what a notebook shows: pictures where Bokeh is installed, and a summary as text."""
        from asyncmem.insight.pictures import mimebundle

        return mimebundle(self.records()) if self._before is not None else {"text/plain": repr(self)}

    @property
    def stats(self) -> PoolStats:
        """The pool's figures at the end of the block, or now; counters count from its beginning.

        Raises:
            InvalidRequest: It has not begun.
        """
        if self._before is None:
            raise InvalidRequest("stats", self, 'a profile that has begun: "with profile_memory(pool) as profile"')
        return since(self._after or self._pool.stats(), counters(self._before))

    def records(self) -> Records:
        """Answer what has happened since the beginning, until the end or now.

        Raises:
            InvalidRequest: It has not begun.
        """
        return self._recording.records()

    def peak_memory(self) -> int:
        """Answer the most bytes that were live at once in the block, as they were asked for.

        Where more has happened than was kept, what came before is not looked at.
        """
        return self.records().peak().nbytes

    def memory_summary(self) -> str:
        """Answer what has happened as text for one screen: the peak and whose it was, hits, growth and waits."""
        return summarize(self.records())
