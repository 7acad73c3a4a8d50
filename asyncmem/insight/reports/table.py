"""`table`: every line that allocates, or every tag, task, thread, pool or size, with its figures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, final

import numpy as np

from asyncmem.core import Kind
from asyncmem.insight.groups import Group
from asyncmem.insight.order import identity_of
from asyncmem.insight.reports.seconds import seconds_by

if TYPE_CHECKING:
    from asyncmem.insight.records import Records


class Row(NamedTuple):
    """Allocations that have something in common."""

    name: str
    """What: a line, a tag, a task, a thread, a pool or a size; "?" for those of which it is not known."""
    at_peak: int
    """Bytes of theirs that were live when the most was,"""
    at_end: int
    """and at the end."""
    allocations: int
    """How many there were,"""
    allocated: int
    """and their bytes together."""
    mean_lifetime: float
    """Seconds that those which were freed were held, on average."""
    waited: float
    """Seconds that requests of theirs waited for others to free memory."""


@final
@dataclass(frozen=True, kw_only=True)
class Table:
    """Allocations by what they have in common."""

    by: str
    """What that is: "site", "tag", "task", "thread", "pool" or "nbytes"."""
    rows: tuple[Row, ...]
    """A row for each, what was largest at the peak first."""


def table(records: Records, by: str = "site") -> Table:
    """Answer a table of allocations.

    Args:
        records: What happened.
        by: What is added up: "site" for lines, "tag", "task", "thread", "pool", or "nbytes" for the size.

    Raises:
        InvalidRequest: There is no such column.
    """
    freed, waited = _freed(records), records.of(Kind.WAITED)
    taken = _named(records.of(Kind.ALLOCATED).by(by))
    peak = _named(records.live_at(records.peak().time).by(by))
    end = _named(records.live_at().by(by))
    lived, waits = seconds_by(freed, by), seconds_by(waited, by)
    counts = _named(freed.by(by))
    rows = [
        Row(
            name=name,
            at_peak=peak.get(name, _NOTHING).nbytes,
            at_end=end.get(name, _NOTHING).nbytes,
            allocations=taken.get(name, _NOTHING).allocations,
            allocated=taken.get(name, _NOTHING).nbytes,
            mean_lifetime=lived.get(name, 0.0) / max(counts.get(name, _NOTHING).allocations, 1),
            waited=waits.get(name, 0.0),
        )
        for name in {**taken, **peak, **end, **waits}
    ]
    rows.sort(key=lambda row: (-row.at_peak, -row.allocated, row.name))
    return Table(by=by, rows=tuple(rows))


def _freed(records: Records) -> Records:
    """Answer what was freed, each with the thread that had allocated it, whoever freed it."""
    rows = records.of(Kind.FREED).rows.copy()
    taken = records.of(Kind.ALLOCATED, Kind.HELD).rows
    taken = taken[np.argsort(identity_of(taken))]
    known, wanted = identity_of(taken), identity_of(rows)
    at = np.searchsorted(known, wanted)
    there = np.flatnonzero(at < len(known))
    there = there[known[at[there]] == wanted[there]]
    rows["thread"][there] = taken["thread"][at[there]]
    return records._some(rows)


_NOTHING = Group("", 0, 0)


def _named(groups: tuple[Group, ...]) -> dict[str, Group]:
    return {group.name: group for group in groups}
