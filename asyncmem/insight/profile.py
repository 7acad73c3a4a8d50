"""`profile_memory` and `MemoryTracker`: what a block of a program does with the memory of a pool, or of all pools."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Self, final

from asyncmem.errors import InvalidRequest
from asyncmem.insight.recording import KEEP, Recording
from asyncmem.insight.reports.summary import summarize
from asyncmem.pool.snapshot import counters, since
from asyncmem.text import quoted

if TYPE_CHECKING:
    from types import TracebackType
    from typing import TextIO

    from asyncmem.insight.records import Records
    from asyncmem.pool import AsyncMemoryPool
    from asyncmem.stats import PoolStats


class AroundPools:
    """Something that begins and ends without blocking, once its pools are open: by ``with`` or ``async with``."""

    _pools: tuple[AsyncMemoryPool, ...]

    def __enter__(self) -> Self:
        """Begin."""
        raise NotImplementedError

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End."""
        raise NotImplementedError

    async def __aenter__(self) -> Self:
        """Open the pools without blocking the loop, and begin as ``with`` does."""
        for pool in self._pools:
            await pool.open()
        return self.__enter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End as ``with`` does."""
        self.__exit__(kind, error, trace)


class _Recorded(AroundPools):
    """A block whose pools are recorded in memory."""

    def __init__(self, *pools: AsyncMemoryPool, frames: int, keep: int) -> None:
        self._pools = pools
        self._recording = Recording(*pools, frames=frames, keep=keep)

    def __enter__(self) -> Self:
        """Begin.

        Raises:
            InvalidRequest: This was entered before.
            PoolClosed: One of the pools is closed.
        """
        self._recording.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End; the records are kept."""
        self._recording.__exit__(kind, error, trace)

    def records(self) -> Records:
        """Return what has happened since the beginning, until the end or now.

        Raises:
            InvalidRequest: It has not begun.
        """
        return self._recording.records()


@final
class MemoryTracker(_Recorded):
    """Records memory while entered by ``with`` or ``async with``, and prints afterwards where it went: `print_summary`.

    Args:
        pools: Which; all of the process for none, those that open later as well.
        frames: How many lines of the call are kept of each request.
        keep: So many of the newest records are kept for each pool, 56 bytes each.
    """

    def __init__(self, *pools: AsyncMemoryPool, frames: int = 1, keep: int = KEEP) -> None:
        super().__init__(*pools, frames=frames, keep=keep)

    def __repr__(self) -> str:
        return f"<asyncmem.insight.MemoryTracker with {self._recording!r}>"

    def summary(self) -> str:
        """Return what has happened as text for one screen."""
        return summarize(self.records())

    def print_summary(self, file: TextIO | None = None) -> None:
        """Print `summary` to a file, to standard output without one."""
        print(self.summary(), file=file or sys.stdout)


def profile_memory(pool: AsyncMemoryPool, *, frames: int = 1, keep: int = KEEP) -> Profile:
    """Look at what a block does with a pool's memory, entered by ``with`` or ``async with``.

    Profiles may be nested, and used beside recordings. While one is entered, an allocation and a free cost some tenths
    of a microsecond more.

    Args:
        pool: What to look at; the block opens it if it is not open yet.
        frames: How many lines of the call are kept of each request.
        keep: So many of the newest records are kept, 56 bytes each.
    """
    return Profile(pool, frames=frames, keep=keep)


@final
class Profile(_Recorded):
    """What a block has done with a pool's memory, or is doing. Made by `profile_memory`; any thread may read it."""

    def __init__(self, pool: AsyncMemoryPool, *, frames: int, keep: int) -> None:
        super().__init__(pool, frames=frames, keep=keep)
        self._pool = pool
        self._before: PoolStats | None = None
        self._after: PoolStats | None = None

    def __repr__(self) -> str:
        return f"<asyncmem.insight.Profile of pool {quoted(self._pool.name)}>"

    def __enter__(self) -> Self:
        """Begin.

        Raises:
            InvalidRequest: This profile was used before.
            PoolClosed: The pool is closed.
        """
        super().__enter__()
        self._before = self._pool.stats()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End; the records are kept."""
        self._after = self._pool.stats()
        super().__exit__(kind, error, trace)

    def _repr_mimebundle_(self, **_wanted: object) -> dict[str, str]:
        """Return what a notebook shows: the pictures, and a summary as text."""
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

    def peak_memory(self) -> int:
        """Return the most bytes that were live at once in the block, as they were asked for.

        Where more has happened than was kept, what came before is not looked at.
        """
        return self.records().peak().nbytes

    def memory_summary(self) -> str:
        """Return what has happened as text for one screen: the peak and whose it was, hits, growth and waits."""
        return summarize(self.records())
