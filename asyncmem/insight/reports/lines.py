"""`table`, `leaks`, `waits` and `tree`: what each line (or tag, task, ...) allocated, kept, and waited for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from asyncmem.core import Kind
from asyncmem.figures import format_count, format_duration, format_size
from asyncmem.insight.groups import Grouped, classes, group_by
from asyncmem.insight.names import Site
from asyncmem.insight.records import Records
from asyncmem.insight.reports.display import Bar, bars
from asyncmem.insight.rows import find, identity_of, priority_of

_NO_SITE: Final = Site("", 0, "")
_GRANTED: Final = 0  # how a wait ended, as its level says
_STEPS: Final = np.array([step * 10**power for power in range(3, 18) for step in (1, 2, 5)])
"""Nanoseconds: the borders of the classes of waits."""


class Row(NamedTuple):
    """Allocations that have something in common.

    Attributes:
        name: A line, a tag, a task, a thread, a pool or a size; "?" where it is not known.
        at_peak: Their bytes that were live at the peak.
        at_end: Their bytes that were live at the end.
        allocations: How many there were.
        allocated: Their bytes together.
        mean_lifetime: Seconds from allocation to free, on average over those that were freed.
        waited: Seconds that their requests waited for other owners to free memory.
    """

    name: str
    at_peak: int
    at_end: int
    allocations: int
    allocated: int
    mean_lifetime: float
    waited: float


@final
@dataclass(frozen=True, kw_only=True)
class Table:
    """Allocations by what they have in common.

    Attributes:
        by: The column: "site", "tag", "task", "thread", "pool" or "nbytes".
        rows: A row for each value of it, what was largest at the peak first.
    """

    by: str
    rows: tuple[Row, ...]

    def _repr_html_(self) -> str:
        sized = self.by == "nbytes"
        return bars(
            f"at the peak, by {self.by}",
            [
                Bar(
                    format_size(int(row.name)) if sized else row.name, row.at_peak,
                    f"{format_size(row.at_peak)}; {format_size(row.at_end)} at the end;"
                    f" {format_count(row.allocations, 'allocation')}; waited {format_duration(row.waited)}",
                )
                for row in self.rows
            ],
        )  # fmt: skip


class Leak(NamedTuple):
    """A line whose buffers were never freed.

    Attributes:
        file: Its file; empty where no line is known.
        line: Its number in the file, or 0.
        function: The function that it is in, or empty.
        nbytes: Bytes of its buffers that were still live at the end.
        buffers: How many they are.
        age: Seconds that the oldest of them was live.
        tags: What they were allocated under.
        pools: The names of their pools.
        outlived: How many of them have outlived their pool: it was closed while they were live.
    """

    file: str
    line: int
    function: str
    nbytes: int
    buffers: int
    age: float
    tags: tuple[str, ...]
    pools: tuple[str, ...]
    outlived: int


@final
@dataclass(frozen=True, kw_only=True)
class Leaks:
    """What was never freed.

    Attributes:
        known: False if the end of the records is missing, and frees with it.
        nbytes: Bytes of all leaked buffers.
        buffers: How many they are.
        outlived: How many of them have outlived their pool.
        lines: One for each line, the most bytes first.
    """

    known: bool
    nbytes: int
    buffers: int
    outlived: int
    lines: tuple[Leak, ...]

    def _repr_html_(self) -> str:
        known = f"{format_size(self.nbytes)} in {format_count(self.buffers, 'buffer')} never freed"
        rows = [
            Bar(
                f"{one.file}:{one.line} ({one.function})" if one.file else "?",
                one.nbytes,
                f"{format_size(one.nbytes)} in {format_count(one.buffers, 'buffer')}, {format_duration(one.age)} old",
            )
            for one in self.lines
        ]
        return bars(known if self.known else "not known: the end of the records is missing", rows)


class WaitingLine(NamedTuple):
    """Requests that waited for other owners to free memory, and have something in common.

    Attributes:
        name: The line, the tag or the priority; "?" where none is known.
        waits: How many waits there were.
        seconds: How long they took together.
        longest: Seconds of the longest.
        given_up: How many did not end with a grant: they were cancelled, timed out or failed.
    """

    name: str
    waits: int
    seconds: float
    longest: float
    given_up: int


class WaitClass(NamedTuple):
    """Waits of about the same length.

    Attributes:
        below: They took fewer seconds than this, and at least as many as the class before.
        waits: How many they are.
    """

    below: float
    waits: int


@final
@dataclass(frozen=True, kw_only=True)
class Waits:
    """The waits for memory.

    Attributes:
        waits: How many there were.
        seconds: How long they took together.
        lines: By line, the longest first.
        tags: By tag, the longest first.
        priorities: By priority, the highest first.
        classes: By length, shortest first: up to 1, 2, 5, 10, 20, 50 ... microseconds.
    """

    waits: int
    seconds: float
    lines: tuple[WaitingLine, ...]
    tags: tuple[WaitingLine, ...]
    priorities: tuple[WaitingLine, ...]
    classes: tuple[WaitClass, ...]

    def _repr_html_(self) -> str:
        rows = [
            Bar(
                one.name, one.seconds,
                f"{format_duration(one.seconds)} in {format_count(one.waits, 'wait')},"
                f" the longest {format_duration(one.longest)}",
            )
            for one in self.lines
        ]  # fmt: skip
        return bars(f"{format_duration(self.seconds)} in {format_count(self.waits, 'wait')}", rows)


@final
@dataclass(kw_only=True)
class Node:
    """A line, and what it called.

    Attributes:
        name: The line; "?" where none is known.
        nbytes: Bytes that are live, of what it and the lines that it called asked for.
        buffers: How many buffers that is.
        calls: The lines that it called, the largest first.
    """

    name: str
    nbytes: int
    buffers: int
    calls: list[Node]


@final
@dataclass(frozen=True, kw_only=True)
class Tree:
    """What was live at one time, by the lines that had called for it.

    Attributes:
        time: When, in seconds from the beginning.
        nbytes: Bytes that were live.
        buffers: How many buffers that was.
        calls: The outermost lines that are known, the largest first.
    """

    time: float
    nbytes: int
    buffers: int
    calls: tuple[Node, ...]

    def _repr_html_(self) -> str:
        def rows(calls: Sequence[Node], depth: int) -> Iterator[Bar]:
            for one in calls:
                text = f"{format_size(one.nbytes)} in {format_count(one.buffers, 'buffer')}"
                yield Bar(one.name, one.nbytes, text, depth)
                yield from rows(one.calls, depth + 1)

        return bars(f"{format_size(self.nbytes)} live after {format_duration(self.time)}", list(rows(self.calls, 0)))


def table(records: Records, by: str = "site") -> Table:
    """Return a table of allocations.

    Args:
        records: What happened.
        by: What is added up: "site" for lines, "tag", "task", "thread", "pool", or "nbytes" for the size.

    Raises:
        InvalidRequest: There is no such column.
    """
    rows = records.rows
    if by == "thread":  # a free counts for the thread that had allocated, whichever thread freed
        rows = rows.copy()
        rows["thread"] = _allocating_threads(rows)
    groups = group_by(rows, records.names, by)
    taken, freed, waited = (rows["kind"] == kind for kind in (Kind.ALLOCATED, Kind.FREED, Kind.WAITED))
    nbytes, spans = rows["nbytes"], rows["span_ns"]
    columns = zip(
        groups.keys,
        groups.sum(nbytes * records._is_live(records.peak().time)),
        groups.sum(nbytes * records._is_live()),
        groups.count(taken),
        groups.sum(nbytes * taken),
        groups.sum(spans * freed),
        groups.count(freed),
        groups.sum(spans * waited),
        groups.count(waited),
        strict=True,
    )
    found = [
        Row(name, at_peak, at_end, allocations, allocated, held / max(frees, 1) / 1e9, waiting / 1e9)
        for name, at_peak, at_end, allocations, allocated, held, frees, waiting, waits in columns
        if at_peak or at_end or allocations or waits
    ]
    return Table(by=by, rows=tuple(sorted(found, key=lambda row: (-row.at_peak, -row.allocated, row.name))))


def _allocating_threads(rows: NDArray[np.void]) -> NDArray[np.uint16]:
    """Return for each row the thread that made its allocation, or its own where that is not known."""
    taken = rows[np.isin(rows["kind"], (Kind.ALLOCATED, Kind.HELD))]
    at, known = find(identity_of(rows), identity_of(taken))
    threads: NDArray[np.uint16] = rows["thread"].copy()
    threads[known] = taken["thread"][at[known]]
    return threads


def leaks(records: Records) -> Leaks:
    """Return what was allocated while it was recorded, and was still live at the end.

    What was there before the recording began is not in it: it is not known what it was for.
    """
    rows, names = records.leaked().rows, records.names
    outlived = np.isin(rows["pool"], records.of(Kind.CLOSED).rows["pool"])
    by_site = Grouped(rows["site"], lambda number: names.site(number) or _NO_SITE)
    columns = zip(
        by_site.keys,
        by_site.sum(rows["nbytes"]),
        by_site.count(),
        by_site.most(records.ended - rows["time_ns"]),
        by_site.names(rows["tag"], names.tag),
        by_site.names(rows["pool"], names.pool),
        by_site.count(outlived),
        strict=True,
    )
    lines = [
        Leak(site.file, site.line, site.function, nbytes, buffers, age / 1e9, *rest)
        for site, nbytes, buffers, age, *rest in columns
    ]
    return Leaks(
        known=records.end_known,
        nbytes=int(rows["nbytes"].sum()),
        buffers=len(rows),
        outlived=int(outlived.sum()),
        lines=tuple(sorted(lines, key=lambda one: (-one.nbytes, one.file, one.line))),
    )


def waits(records: Records) -> Waits:
    """Return what waited for memory, and for how long. A wait that has not ended is not in it."""
    waited, names = records.of(Kind.WAITED), records.names
    rows = waited.rows
    priorities = _longest_first(Grouped(priority_of(rows), str), rows)
    return Waits(
        waits=len(rows),
        seconds=waited.seconds,
        lines=_longest_first(group_by(rows, names, "site"), rows),
        tags=_longest_first(group_by(rows, names, "tag"), rows),
        priorities=tuple(sorted(priorities, key=lambda one: -int(one.name))),
        classes=tuple(WaitClass(below / 1e9, count) for below, count, _ in classes(rows["span_ns"], _STEPS)),
    )


def _longest_first(groups: Grouped[str], rows: NDArray[np.void]) -> tuple[WaitingLine, ...]:
    spans = rows["span_ns"]
    given_up = groups.count(rows["level"] != _GRANTED)
    columns = zip(groups.keys, groups.count(), groups.sum(spans), groups.most(spans), given_up, strict=True)
    found = (
        WaitingLine(name, count, all_ns / 1e9, most_ns / 1e9, lost) for name, count, all_ns, most_ns, lost in columns
    )
    return tuple(sorted(found, key=lambda one: (-one.seconds, one.name)))


def tree(records: Records, time: float | None = None) -> Tree:
    """Return what is live, as a tree of lines.

    Args:
        records: What happened. They have as many lines of each call as the recording's `frames` says.
        time: When, in seconds from the beginning; when the most was live without it.
    """
    when = records.peak().time if time is None else time
    live = records.live_at(when)
    root = _node(lines_of(live, live.rows["nbytes"]))
    return Tree(time=when, nbytes=root.nbytes, buffers=root.buffers, calls=tuple(root.calls))


def _node(line: Line) -> Node:
    calls = [_node(one) for one in line.largest_first()]
    return Node(name=str(line.site or "?"), nbytes=round(line.weight), buffers=line.requests, calls=calls)


@dataclass
class Line:
    """A line, with the sums over it and all lines that it called.

    Attributes:
        site: The line; None for the root, and where none is known.
        weight: Bytes or seconds.
        requests: The number of buffers or waits.
        tags: The weight of each tag, by its number.
        calls: The lines that it called.
    """

    site: Site | None = None
    weight: float = 0.0
    requests: int = 0
    tags: Counter[int] = field(default_factory=Counter)
    calls: dict[Site | None, Line] = field(default_factory=dict)

    def largest_first(self) -> list[Line]:
        """Return the lines that it called."""
        return sorted(self.calls.values(), key=lambda one: (-one.weight, str(one.site)))


def lines_of(records: Records, weights: NDArray[np.generic]) -> Line:
    """Return the root of a tree of lines, in which each record counts for its call with a weight."""
    rows = records.rows
    keys, places = np.unique(rows["site"].astype(np.uint64) << np.uint64(16) | rows["tag"], return_inverse=True)
    sums = np.bincount(places, weights, len(keys)).tolist()
    counts = np.bincount(places, minlength=len(keys)).tolist()
    root = Line()
    for key, weight, count in zip(keys.tolist(), sums, counts, strict=True):
        way = [root]
        for site in records.names.frames(key >> 16)[::-1] or (None,):
            way.append(way[-1].calls.setdefault(site, Line(site)))
        for line in way:
            line.weight += weight
            line.requests += count
            line.tags[key & 0xFFFF] += weight
    return root
