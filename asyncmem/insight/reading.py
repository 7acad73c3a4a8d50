"""Reads the records of a file, also of one that was never finished or is damaged."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator
from os import PathLike
from pathlib import Path
from typing import Any, Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from asyncmem.core import Kind, Level
from asyncmem.errors import BadTrace
from asyncmem.files import naming, open_file
from asyncmem.insight.amem import MAGIC, VERSION, End, Heading, NewNames, Pool, Rows, Unit, Unread, unpack, unpack_rows
from asyncmem.insight.names import Names, Origin, PoolName, Site
from asyncmem.insight.records import Records
from asyncmem.insight.rows import CUT, MOST_FRAMES, OUTCOMES, ROW, bridged, in_order

T = TypeVar("T")

_UNFINISHED: Final = "The recording was not ended: its process died, or it goes on."
_GAPS: Final = "Records were lost on the way: what was freed among them is taken as freed where they go on."
_GAPS_OPEN: Final = "Records were lost on the way: what was freed among them counts as live."

_NO_POOL: Final = PoolName("?", "?", 0)
_LARGEST: Final = 1 << 62
"""Of times, sizes and sums of sizes: two of them are added without a second thought."""
_LEVELS: Final = {Kind.ALLOCATED: tuple(Level), **OUTCOMES}


def read_file(path: str | PathLike[str]) -> Records:
    """Read a file of records; see `asyncmem.insight.read`."""
    with open_file(path) as file, naming(path):
        found = _Found(os.fstat(file.fileno()).st_size)
        if file.read(len(MAGIC)) != MAGIC:
            raise BadTrace("something else", "a file of records (.amem)")
        for unit in unpack(file):
            found.take(unit)
        return found.records()


class _Found:
    """What the blocks of a file have said so far."""

    def __init__(self, size: int) -> None:
        self._size = size  # of the file
        self._heading: Heading | None = None
        self._names = Names(places=[None], sites=[(0, 0)], tasks=[""], tags=[""], threads=[None], pools=[])
        self._rows: list[NDArray[np.void]] = [np.empty(0, ROW)]
        self._held: list[NDArray[np.void]] = [np.empty(0, ROW)]
        self._lost: dict[int, int] = {}
        self._gaps: list[tuple[int, int]] = []  # pools, and when their records go on
        self._unbroken: set[int] = set()  # pools with rows since the last damage
        self._listed: set[int] = set()  # pools of which it is known what is live at the end
        self._cut: set[int] = set()  # pools of which later ones are missing
        self._ended: int | None = None
        self._unread: set[Unread] = set()
        self._damaged = False

    def take(self, unit: Unit) -> None:
        """Take in the next block, or the news that there is none to be read."""
        match unit:
            case Heading():
                if unit.version != VERSION:
                    raise BadTrace(f"version {unit.version}", f"version {VERSION}")
                self._heading = unit
            case Pool():
                if self._damaged:  # the blocks of others may be missing
                    _extend(self._names.pools, unit.number, _NO_POOL)
                self._names.pools.append(PoolName(unit.name, unit.device, unit.limit, unit.options))
            case NewNames():
                self._add_names(unit)
            case Rows():
                self._add_rows(unit)
            case End():
                self._ended = unit.time
            case Unread():
                self._unread.add(unit)
                if unit is not Unread.UNKNOWN:
                    self._damaged = True
                    self._unbroken.clear()

    def _add_names(self, new: NewNames) -> None:
        names = self._names
        if self._damaged and new.firsts:
            if max(new.firsts) > self._size:
                raise BadTrace(f"{max(new.firsts):,} names before others", "no more than bytes of the file")
            places, sites, tasks, tags = new.firsts
            _extend(names.places, places, None)
            _extend(names.sites, sites, (0, 0))
            _extend(names.tasks, tasks, "")
            _extend(names.tags, tags, "")
        names.places.extend(None if _is_start(place) else Site(*place) for place in new.places)
        names.sites.extend(new.sites)
        names.tasks.extend(new.tasks)
        names.tags.extend(new.tags)
        for number, name in new.threads.items():
            _extend(names.threads, number + 1, None)
            names.threads[number] = name

    def _add_rows(self, block: Rows) -> None:
        try:
            rows = unpack_rows(block, ROW)
        except (ValueError, zlib.error) as error:
            raise BadTrace(f"damaged rows ({error})", f"{block.count:,} of them") from error
        lost = self._lost.get(block.pool, 0)
        self._lost[block.pool] = max(lost, block.lost)
        if block.cut:
            self._cut.add(block.pool)
        if block.held:
            self._listed.add(block.pool)
            self._held.append(rows)
            return
        self._rows.append(rows)
        broken = self._damaged and block.pool not in self._unbroken
        if len(rows) and (broken or block.lost > lost):
            self._gaps.append((block.pool, int(rows["time_ns"][0])))
            self._unbroken.add(block.pool)

    def records(self) -> Records:
        """Return all of it."""
        held, rows = np.concatenate(self._held), np.concatenate(self._rows)
        self._rows.clear()  # which may be as much memory again
        names, heading = self._names, self._heading
        if self._damaged:
            self._forget_what_is_missing(held, rows)
        for some in (held, rows):
            _need_sound(some, names)
        if heading is None and not (self._damaged and len(rows)):
            raise BadTrace("nothing", "a file of records (.amem)")
        began = int(rows["time_ns"].min()) if heading is None else heading.began
        ended = int(rows["time_ns"].max(initial=began)) if self._ended is None else self._ended
        if self._ended is not None:
            open_ended = range(len(names.pools)) if self._damaged else self._cut
            gaps = [*self._gaps, *((pool, ended) for pool in open_ended)]
            rows = bridged(rows, held, gaps) if gaps else rows
        return Records(
            in_order(held, rows, began), names, began=began, wall=0.0 if heading is None else heading.wall, ended=ended,
            lost=sum(self._lost.values()), note=" ".join(self._notes()), end_known=self._knows_end(),
            origin=Origin() if heading is None else _origin(heading),
        )  # fmt: skip

    def _notes(self) -> Iterator[str]:
        yield from (one.value for one in Unread if one in self._unread)
        if self._ended is None:
            yield _UNFINISHED
        if self._gaps and (self._ended is not None or not self._damaged):
            yield _GAPS_OPEN if self._ended is None else _GAPS
        if self._cut:
            yield CUT

    def _knows_end(self) -> bool:
        if self._damaged:
            return self._ended is not None and self._listed.issuperset(range(len(self._names.pools)))
        return self._ended is not None or not self._gaps

    def _forget_what_is_missing(self, *tables: NDArray[np.void]) -> None:
        """Clear the names of rows whose names are missing."""
        names = self._names
        for rows in tables:
            for column, known in (("site", names.sites), ("task", names.tasks), ("tag", names.tags)):
                rows[column][rows[column] >= len(known)] = 0
            _extend(names.pools, int(rows["pool"].max(initial=0)) + 1, _NO_POOL)
        names.sites[:] = [
            (place, caller) if place < len(names.places) and caller < max(number, 1) else (0, 0)
            for number, (place, caller) in enumerate(names.sites)
        ]


def _origin(heading: Heading) -> Origin:
    return Origin(tuple(heading.program), heading.process, heading.host, heading.python, heading.asyncmem)


def _extend(known: list[T], length: int, unknown: T) -> None:
    known += [unknown] * (length - len(known))


def _is_start(place: tuple[str, int, str]) -> bool:
    """Return whether this is where ``asyncmem run`` runs a program: who called that is not the program's."""
    file, _, function = place
    return function == "Program.run" and Path(file).parts[-3:] == ("asyncmem", "cli", "program.py")


def _need_sound(rows: NDArray[np.void], names: Names) -> None:
    """Make sure that rows point to names that there are, and can be added up.

    Raises:
        BadTrace: One of them cannot.
    """
    _need_callers(names)
    ends = {"pool": len(names.pools), "site": len(names.sites), "task": len(names.tasks), "tag": len(names.tags)}
    for column, end in {**ends, "kind": len(Kind)}.items():
        _need_below(end, rows[column], column)
    for kind, levels in _LEVELS.items():
        _need_below(len(levels), rows["level"][rows["kind"] == kind], "level")
    for column in ("time_ns", "nbytes", "address", "span_ns"):
        for extreme in (rows[column].max(initial=0), rows[column].min(initial=0)):
            if abs(int(extreme)) >= _LARGEST:
                raise BadTrace(f"{column} {extreme}", "less than 2**62")
    # In floating point a sum that is too large stays too large.
    if (total := float(rows["nbytes"].sum(dtype=np.float64))) >= _LARGEST:
        raise BadTrace(f"{total:.3g} bytes in all", "less than 2**62")


def _need_callers(names: Names) -> None:
    depths: list[int] = []
    for number, (place, caller) in enumerate(names.sites):
        if not 0 <= place < len(names.places) or not 0 <= caller < max(number, 1):
            raise BadTrace(f"call {number} of line {place} from call {caller}", "those before it")
        depths.append(depths[caller] + 1 if number else 0)
        if depths[-1] > MOST_FRAMES:
            raise BadTrace(f"call {number} in {depths[-1]} lines", f"at most {MOST_FRAMES}")


def _need_below(end: int, numbers: NDArray[Any], what: str) -> None:
    if len(numbers) and (most := int(numbers.max())) >= end:
        raise BadTrace(f"{what} {most}", f"one of {end}")
