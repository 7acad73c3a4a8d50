"""`MemoryTracker`: what a block of a program does with the memory of all pools."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Self, final

from asyncmem.insight.entering import AroundPools
from asyncmem.insight.recording import KEEP, Recording
from asyncmem.insight.summary import summarize

if TYPE_CHECKING:
    from types import TracebackType
    from typing import TextIO

    from asyncmem.insight.records import Records
    from asyncmem.pool import AsyncMemoryPool


@final
class MemoryTracker(AroundPools):
    """Follows memory while entered by ``with`` or ``async with``, and says afterwards where it went: `print_summary`.

    Args:
        pools: Which; all of the process for none, those that open later as well.
        frames: How many lines of the call are kept of each request.
        keep: So many of the newest records are kept for each pool, 56 bytes each.
    """

    def __init__(self, *pools: AsyncMemoryPool, frames: int = 1, keep: int = KEEP) -> None:
        self._pools = pools
        self._recording = Recording(*pools, frames=frames, keep=keep)

    def __repr__(self) -> str:
        return f"<asyncmem.insight.MemoryTracker with {self._recording!r}>"

    def __enter__(self) -> Self:
        """Begin.

        Raises:
            InvalidRequest: This tracker was used before.
            PoolClosed: One of the pools is closed.
        """
        self._recording.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End; what was seen is kept."""
        self._recording.__exit__(kind, error, trace)

    def records(self) -> Records:
        """Answer what has happened since the beginning, until the end or now.

        Raises:
            InvalidRequest: It has not begun.
        """
        return self._recording.records()

    def summary(self) -> str:
        """Answer what has happened as text for one screen."""
        return summarize(self.records())

    def print_summary(self, file: TextIO | None = None) -> None:
        """Print `summary` to a file, to standard output without one."""
        print(self.summary(), file=file or sys.stdout)
