"""`Watch`: what a test does with the memory of all pools, and what there is to say against it."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Final, Self, final

import numpy as np

from asyncmem.core import Kind
from asyncmem.figures import format_count, format_size
from asyncmem.insight.groups import grouped
from asyncmem.insight.recording import Recording
from asyncmem.insight.rows import ROW, change_of, identity_of
from asyncmem.text import printable

if TYPE_CHECKING:
    from types import TracebackType

    from numpy.typing import NDArray

    from asyncmem.insight.recording import RecordedPool

_KEEP: Final = 1 << 21
_SHOWN: Final = 10


@final
class Watch:
    """Watches what is allocated while it is entered by ``with``. What was there before does not count.

    Args:
        limit: The most bytes that may be live at once; None for any.
        leaks: Whether all must be freed by the end.
    """

    def __init__(self, *, limit: int | None, leaks: bool) -> None:
        self._limit = limit
        self._leaks = leaks
        # What is live at the end is known without records.
        self._recording = Recording(keep=1 if limit is None else _KEEP)
        self._collects = False
        self._at_the_end = np.empty(0, ROW)

    def __enter__(self) -> Self:
        """Begin; where leaks are looked for, the garbage collector rests until the end, so that it hides none."""
        self._collects = self._leaks and gc.isenabled()
        if self._collects:
            gc.collect()
            gc.disable()
        self._recording.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End; what is live only until the garbage collector runs is known after it."""
        if self._leaks:
            self._at_the_end = self._live()
            if self._collects:
                gc.enable()
            gc.collect()
        self._recording.__exit__(kind, error, trace)

    def complaint(self) -> str:
        """Return what is wrong, with the lines that did it; empty for nothing."""
        found = (self._over_limit() if self._limit is not None else "", self._left() if self._leaks else "")
        return "\n".join(filter(None, found))

    def _over_limit(self) -> str:
        assert self._limit is not None
        records = self._recording.records()
        nbytes, rows = _most_live(records.rows)
        if nbytes > self._limit:
            head = f"{format_size(nbytes)} were live at once where {format_size(self._limit)} are allowed:"
            return self._told("asyncmem_limit", head, rows)
        if records.lost:
            return f"asyncmem_limit: the first {records.lost:,} records are not known, because only {_KEEP:,} are kept"
        return ""

    def _left(self) -> str:
        rows, kept = self._at_the_end, self._live()
        told = []
        if len(kept):
            head = f"{_sum(kept)} still live after the test that allocated them:"
            told.append(self._told("asyncmem_no_leaks", head, kept))
        cycles = rows[~np.isin(identity_of(rows), identity_of(kept))]
        if len(cycles):
            head = f"{_sum(cycles)} in reference cycles, live until the garbage collector runs:"
            told.append(self._told("asyncmem_no_leaks", head, cycles))
        return "\n".join(told)

    def _live(self) -> NDArray[np.void]:
        return np.concatenate([np.empty(0, ROW), *map(_left_in, self._recording._recorded)])

    def _told(self, mark: str, head: str, rows: NDArray[np.void]) -> str:
        sites = grouped(rows, self._recording.records().names, "site")
        lines = [f"{mark}: {head}"]
        lines += [
            f"  {format_size(one.nbytes)} in {format_count(one.allocations, 'buffer')} at {printable(one.name)}"
            for one in sites[:_SHOWN]
        ]
        if len(sites) > _SHOWN:
            lines.append(f"  and at {len(sites) - _SHOWN:,} more lines")
        return "\n".join(lines)


def _sum(rows: NDArray[np.void]) -> str:
    return f"{format_count(len(rows), 'buffer')} of {format_size(int(rows['nbytes'].sum()))}"


def _most_live(rows: NDArray[np.void]) -> tuple[int, NDArray[np.void]]:
    """Return the most bytes that allocations of these rows had live at once, and the rows of those allocations."""
    born = rows["kind"] == Kind.ALLOCATED
    rows = rows[born | ((rows["kind"] == Kind.FREED) & np.isin(identity_of(rows), identity_of(rows[born])))]
    live = np.cumsum(change_of(rows, Kind.FREED))
    if not len(live):
        return 0, rows
    rows, most = rows[: int(np.argmax(live)) + 1], int(live.max())
    born = rows["kind"] == Kind.ALLOCATED
    return most, rows[born & ~np.isin(identity_of(rows), identity_of(rows[~born]))]


def _left_in(pool: RecordedPool) -> NDArray[np.void]:
    before = pool.before[pool.before["kind"] == Kind.HELD]["number"]
    rows = pool.held()
    return rows[rows["number"] > before.max()] if len(before) else rows
