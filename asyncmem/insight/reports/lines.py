"""`table`, `leaks` and `waits`: what each line (or tag, task, thread, pool, size) allocated, kept, and waited for."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple, final

import numpy as np

from asyncmem.core import Kind
from asyncmem.insight.groups import Group, naming, parts, seconds_by
from asyncmem.insight.names import Site
from asyncmem.insight.rows import identity_of, priority_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from numpy.typing import NDArray

    from asyncmem.insight.records import Records

_NOTHING: Final = Group("", 0, 0)
_GRANTED: Final = 0  # how a wait ended, as its level says
_STEPS: Final = np.array([step * 10**power for power in range(3, 18) for step in (1, 2, 5)])
"""Nanoseconds: the borders of the classes of waits."""
_BORDERS: Final = (*(_STEPS / 1e9).tolist(), float("inf"))
"""The same in seconds, with that of the last class."""


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


class Leak(NamedTuple):
    """A line that allocated what was never freed."""

    file: str
    """Its file,"""
    line: int
    """its number in that,"""
    function: str
    """and the function that it is in; empty, 0 and empty where no line is known."""
    nbytes: int
    """Bytes of its buffers that were still live at the end,"""
    buffers: int
    """how many they are,"""
    age: float
    """and for how many seconds the oldest of them was."""
    tags: tuple[str, ...]
    """What they were allocated under."""
    pools: tuple[str, ...]
    """Where."""
    outlived: int
    """How many of the buffers have outlived their pool: it was closed while they were live."""


@final
@dataclass(frozen=True, kw_only=True)
class Leaks:
    """What was never freed."""

    known: bool
    """Whether that is known: not where the end of the records is missing, and frees with it."""
    nbytes: int
    """Bytes of it,"""
    buffers: int
    """in how many buffers,"""
    outlived: int
    """how many of which have outlived their pool."""
    lines: tuple[Leak, ...]
    """By lines, the most bytes first."""


class WaitingLine(NamedTuple):
    """Requests that waited for others to free memory, and have something in common."""

    name: str
    """The line, the tag or the priority; "?" where none is known."""
    waits: int
    """How often,"""
    seconds: float
    """for how long together,"""
    longest: float
    """and the longest time."""
    given_up: int
    """How many of them were not granted: cancelled, timed out or failed."""


class WaitClass(NamedTuple):
    """Waits that took about as long."""

    below: float
    """They took fewer seconds than this, and at least as many as the class before."""
    waits: int
    """How many they are."""


@final
@dataclass(frozen=True, kw_only=True)
class Waits:
    """The waits for memory."""

    waits: int
    """How many there were,"""
    seconds: float
    """and for how long together."""
    lines: tuple[WaitingLine, ...]
    """By line, the longest first,"""
    tags: tuple[WaitingLine, ...]
    """by tag,"""
    priorities: tuple[WaitingLine, ...]
    """by priority, the highest first,"""
    classes: tuple[WaitClass, ...]
    """and by how long they took, shortest first: at 1, 2, 5, 10, 20, 50 ... microseconds."""


def table(records: Records, by: str = "site") -> Table:
    """Return a table of allocations.

    Args:
        records: What happened.
        by: What is added up: "site" for lines, "tag", "task", "thread", "pool", or "nbytes" for the size.

    Raises:
        InvalidRequest: There is no such column.
    """
    freed, names = _freed(records), records.names
    taken = _named(records.of(Kind.ALLOCATED).by(by))
    peak = _named(records.live_at(records.peak().time).by(by))
    end = _named(records.live_at().by(by))
    lived, waited = (seconds_by(those.rows, names, by) for those in (freed, records.of(Kind.WAITED)))
    counts = _named(freed.by(by))
    rows = [
        Row(
            name=name,
            at_peak=peak.get(name, _NOTHING).nbytes,
            at_end=end.get(name, _NOTHING).nbytes,
            allocations=taken.get(name, _NOTHING).allocations,
            allocated=taken.get(name, _NOTHING).nbytes,
            mean_lifetime=lived.get(name, 0.0) / max(counts.get(name, _NOTHING).allocations, 1),
            waited=waited.get(name, 0.0),
        )
        for name in {**taken, **peak, **end, **waited}
    ]
    rows.sort(key=lambda row: (-row.at_peak, -row.allocated, row.name))
    return Table(by=by, rows=tuple(rows))


def _freed(records: Records) -> Records:
    """Return what was freed, each with the thread that had allocated it, whichever thread freed it."""
    rows = records.of(Kind.FREED).rows.copy()
    taken = records.of(Kind.ALLOCATED, Kind.HELD).rows
    taken = taken[np.argsort(identity_of(taken))]
    known, wanted = identity_of(taken), identity_of(rows)
    at = np.searchsorted(known, wanted)
    there = np.flatnonzero(at < len(known))
    there = there[known[at[there]] == wanted[there]]
    rows["thread"][there] = taken["thread"][at[there]]
    return records.with_rows(rows)


def _named(groups: tuple[Group, ...]) -> dict[str, Group]:
    return {group.name: group for group in groups}


def leaks(records: Records) -> Leaks:
    """Return what was allocated while it was recorded, and was still live at the end.

    What was there before the recording began is not in it: it is not known what it was for.
    """
    rows, names = records.leaked().rows, records.names
    outlived = np.isin(rows["pool"], records.of(Kind.CLOSED).rows["pool"])
    found: dict[Site, Leak] = {}
    tags: defaultdict[Site, set[str]] = defaultdict(set)
    pools: defaultdict[Site, set[str]] = defaultdict(set)
    for number, those in parts(rows, "site"):
        site = names.site(number) or Site("", 0, "")
        before = found.get(site, Leak(*site, 0, 0, 0.0, (), (), 0))
        tags[site].update(tag for one in np.unique(those["tag"]).tolist() if (tag := names.tag(one)))
        pools[site].update(names.pools[one].name for one in np.unique(those["pool"]).tolist())
        found[site] = before._replace(
            nbytes=before.nbytes + int(those["nbytes"].sum()),
            buffers=before.buffers + len(those),
            age=max(before.age, (records.ended - int(those["time_ns"].min())) / 1e9),
            outlived=before.outlived + int(outlived[rows["site"] == number].sum()),
        )
    lines = [one._replace(tags=tuple(sorted(tags[at])), pools=tuple(sorted(pools[at]))) for at, one in found.items()]
    return Leaks(
        known=records.end_known,
        nbytes=int(rows["nbytes"].sum()),
        buffers=len(rows),
        outlived=int(outlived.sum()),
        lines=tuple(sorted(lines, key=lambda one: (-one.nbytes, one.file, one.line))),
    )


def waits(records: Records) -> Waits:
    """Return who waited for memory, and for how long. A wait that still goes on at the end is not in it."""
    rows, names = records.of(Kind.WAITED).rows, records.names
    priorities = priority_of(rows)
    by_priority = ((number, rows[priorities == number]) for number in np.unique(priorities).tolist())
    counts = np.bincount(np.searchsorted(_STEPS, rows["span_ns"], side="right"), minlength=len(_STEPS) + 1).tolist()
    return Waits(
        waits=len(rows),
        seconds=float(rows["span_ns"].sum(dtype=float)) / 1e9,
        lines=_longest_first(parts(rows, "site"), naming(names, "site")),
        tags=_longest_first(parts(rows, "tag"), naming(names, "tag")),
        priorities=tuple(sorted(_longest_first(by_priority, str), key=lambda one: -int(one.name))),
        classes=tuple(WaitClass(below, count) for below, count in zip(_BORDERS, counts, strict=True) if count),
    )


def _longest_first(
    groups: Iterable[tuple[int, NDArray[np.void]]], spell: Callable[[int], str | None]
) -> tuple[WaitingLine, ...]:
    found: dict[str, WaitingLine] = {}
    for number, rows in groups:
        spans, name = rows["span_ns"], spell(number) or "?"
        before = found.get(name, WaitingLine(name, 0, 0.0, 0.0, 0))
        found[name] = WaitingLine(
            name,
            before.waits + len(rows),
            before.seconds + float(spans.sum(dtype=float)) / 1e9,
            max(before.longest, int(spans.max()) / 1e9),
            before.given_up + int(np.count_nonzero(rows["level"] != _GRANTED)),
        )
    return tuple(sorted(found.values(), key=lambda one: (-one.seconds, one.name)))
