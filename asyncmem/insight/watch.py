"""`Watch`: records what a test does with the memory of all pools, and says what is wrong with it."""

from __future__ import annotations

import gc
from typing import Final, Self, final

import numpy as np
from numpy.typing import NDArray

from asyncmem.core import Kind
from asyncmem.figures import format_count, format_size
from asyncmem.insight.groups import grouped
from asyncmem.insight.recording import Recording
from asyncmem.insight.rows import ROW, identity_of
from asyncmem.text import printable

_KEEP: Final = 1 << 21
_SHOWN: Final = 10


@final
class Watch(Recording):
    """Watches what is allocated while it is entered by ``with``. What was there before does not count.

    Args:
        limit: The most bytes that may be live at once; None for any.
        leaks: Whether all must be freed by the end.
    """

    def __init__(self, *, limit: int | None, leaks: bool) -> None:
        super().__init__(keep=1 if limit is None else _KEEP)  # what is live at the end is known without records
        self._limit = limit
        self._leaks = leaks
        self._collects = False
        self._at_the_end = np.empty(0, ROW)

    def __enter__(self) -> Self:
        """Begin; where leaks are looked for, the garbage collector rests until the end, so that it hides none."""
        self._collects = self._leaks and gc.isenabled()
        if self._collects:
            gc.collect()
            gc.disable()
        return super().__enter__()

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        """End; what is live only until the garbage collector runs is known after it."""
        if self._leaks:
            self._at_the_end = self._live()
            if self._collects:
                gc.enable()
            gc.collect()
        super().__exit__(kind, error, trace)

    def complaint(self) -> str:
        """Return what is wrong, with the lines that did it; empty for nothing."""
        found = [self._exceeded(self._limit)] if self._limit is not None else []
        if self._leaks:
            kept, last = self._live(), self._at_the_end
            cycles = last[~np.isin(identity_of(last), identity_of(kept))]
            found.append(self._leaked(kept, "still live after the test that allocated them"))
            found.append(self._leaked(cycles, "in reference cycles, live until the garbage collector runs"))
        return "\n".join(filter(None, found))

    def _exceeded(self, limit: int) -> str:
        records = self.records()
        own = identity_of(records.of(Kind.ALLOCATED).rows)
        mine = records.with_rows(records.rows[np.isin(identity_of(records.rows), own)])
        peak = mine.peak()
        if peak.nbytes > limit:
            head = f"{format_size(peak.nbytes)} were live at once where {format_size(limit)} are allowed"
            return self._told("asyncmem_limit", head, mine.live_at(peak.time).rows)
        if records.lost:
            return f"asyncmem_limit: the first {records.lost:,} records are not known, because only {_KEEP:,} are kept"
        return ""

    def _leaked(self, rows: NDArray[np.void], how: str) -> str:
        count = f"{format_count(len(rows), 'buffer')} of {format_size(int(rows['nbytes'].sum()))}"
        return self._told("asyncmem_no_leaks", f"{count} {how}", rows) if len(rows) else ""

    def _live(self) -> NDArray[np.void]:
        return np.concatenate([np.empty(0, ROW), *(one.kept_by_block() for one in self._recorded)])

    def _told(self, mark: str, head: str, rows: NDArray[np.void]) -> str:
        sites = grouped(rows, self.records().names, "site")
        lines = [f"{mark}: {head}:"]
        lines += [
            f"  {format_size(one.nbytes)} in {format_count(one.allocations, 'buffer')} at {printable(one.name)}"
            for one in sites[:_SHOWN]
        ]
        if len(sites) > _SHOWN:
            lines.append(f"  and at {len(sites) - _SHOWN:,} more lines")
        return "\n".join(lines)
