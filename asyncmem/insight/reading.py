"""`read`: the records of a file, also of one that was never finished or is damaged."""

from __future__ import annotations

import os
import zlib
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import numpy as np

from asyncmem.core import Kind, Level
from asyncmem.errors import BadTrace
from asyncmem.files import naming, open_file
from asyncmem.insight.names import Names, Origin, PoolName, Site
from asyncmem.insight.records import Records
from asyncmem.insight.rows import MOST_FRAMES, ROW, WAIT_ENDS, bridged, in_order
from asyncmem.stats import Pressure

if TYPE_CHECKING:
    from os import PathLike

    from numpy.typing import NDArray

    from asyncmem.insight.amem import Heading, NewNames, Pool, Rows, Unit

T = TypeVar("T")

_DAMAGED: Final = "The file is damaged, and parts of it are missing."
_TORN: Final = "The file is damaged: it ends in the middle, and what came after is missing."
_UNFINISHED: Final = "The recording was not ended: its process died, or it goes on."
_UNKNOWN: Final = "Parts of it are of a newer asyncmem, and were left out."
_GAPS: Final = "Records were lost on the way: what was freed among them is taken as freed where they go on."
_GAPS_OPEN: Final = "Records were lost on the way: what was freed among them counts as live."
_CUT: Final = "There was no memory for more records."

_NO_POOL: Final = PoolName("?", "?", 0)
_LARGEST: Final = 1 << 62
"""Of times, sizes and sums of sizes: two of them are added without a second thought."""
_LEVELS: Final = {Kind.ALLOCATED: len(Level), Kind.WAITED: len(WAIT_ENDS), Kind.PRESSURE: len(Pressure)}


def need_msgspec(purpose: str) -> None:
    """Make sure that msgspec is installed.

    Raises:
        ModuleNotFoundError: It is not; the text says how to install it.
    """
    if find_spec("msgspec") is None:
        raise ModuleNotFoundError(f"{purpose} needs msgspec: pip install 'asyncmem[insight]'", name="msgspec")


def read(path: str | PathLike[str]) -> Records:
    """Read a file of records, ``.amem``.

    Of a file whose process died, or that is damaged, all blocks that are whole are read; `Records.note` says what is
    missing. What was freed in a damaged part counts as freed; where the end is missing, `Records.end_known` is False.

    Raises:
        BadTrace: It is no such file, or of a version that this asyncmem does not know.
        ModuleNotFoundError: The extra `insight` is not installed.
        OSError: It cannot be read.
    """
    need_msgspec("reading a file of records")
    from asyncmem.insight.amem import MAGIC, unpack

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
        self._pools: list[PoolName] = []
        self._places: list[Site | None] = [None]
        self._sites: list[tuple[int, int]] = [(0, 0)]
        self._tasks, self._tags = [""], [""]
        self._threads: list[str | None] = [None]
        self._rows: list[NDArray[np.void]] = [np.empty(0, ROW)]
        self._held: list[NDArray[np.void]] = [np.empty(0, ROW)]
        self._lost: dict[int, int] = {}
        self._gaps: list[tuple[int, int]] = []  # pools, and when their records go on
        self._unbroken: set[int] = set()  # pools with rows since the last damage
        self._listed: set[int] = set()  # pools of which it is known what is live at the end
        self._cut: set[int] = set()  # pools of which later ones are missing
        self._ended: int | None = None
        self._damaged = False
        self._missing = dict.fromkeys((_DAMAGED, _TORN, _UNFINISHED, _UNKNOWN, _GAPS, _GAPS_OPEN, _CUT), False)
        self._missing[_UNFINISHED] = True

    def take(self, unit: Unit) -> None:
        """Take in the next block, or the news that there is none to be read."""
        from asyncmem.insight.amem import VERSION, End, Heading, NewNames, Pool, Unread

        if isinstance(unit, Heading) and unit.version != VERSION:
            raise BadTrace(f"version {unit.version}", f"version {VERSION}")
        match unit:
            case Unread.UNKNOWN:
                self._missing[_UNKNOWN] = True
            case Unread.DAMAGED | Unread.TORN:
                self._missing[_DAMAGED if unit is Unread.DAMAGED else _TORN] = self._damaged = True
                self._unbroken.clear()
            case Heading():
                self._heading = unit
            case Pool():
                self._add_pool(unit)
            case NewNames():
                self._add_names(unit)
            case End():
                self._missing[_UNFINISHED] = False
                self._ended = unit.time
            case _:
                self._add_rows(unit)

    def _add_pool(self, pool: Pool) -> None:
        if self._damaged:  # the blocks of others may be missing
            _extend(self._pools, pool.number, _NO_POOL)
        self._pools.append(PoolName(pool.name, pool.device, pool.limit, pool.options))

    def _add_names(self, names: NewNames) -> None:
        if self._damaged and names.firsts:
            if max(names.firsts) > self._size:
                raise BadTrace(f"{max(names.firsts):,} names before others", "no more than bytes of the file")
            places, sites, tasks, tags = names.firsts
            _extend(self._places, places, None)
            _extend(self._sites, sites, (0, 0))
            _extend(self._tasks, tasks, "")
            _extend(self._tags, tags, "")
        self._places += (None if _is_start(place) else Site(*place) for place in names.places)
        self._sites += names.sites
        self._tasks += names.tasks
        self._tags += names.tags
        for number, name in names.threads.items():
            _extend(self._threads, number + 1, None)
            self._threads[number] = name

    def _add_rows(self, block: Rows) -> None:
        from asyncmem.insight.amem import unpack_rows

        try:
            rows = unpack_rows(block, ROW)
        except (ValueError, zlib.error) as error:
            raise BadTrace(f"damaged rows ({error})", f"{block.count:,} of them") from error
        if block.held:
            self._listed.add(block.pool)
        (self._held if block.held else self._rows).append(rows)
        broken = self._damaged and block.pool not in self._unbroken
        if (broken or block.lost > self._lost.get(block.pool, 0)) and len(rows) and not block.held:
            self._gaps.append((block.pool, int(rows["time_ns"][0])))
            self._unbroken.add(block.pool)
        self._lost[block.pool] = max(self._lost.get(block.pool, 0), block.lost)
        if block.cut:
            self._missing[_CUT] = True
            self._cut.add(block.pool)

    def records(self) -> Records:
        """Return all of it."""
        held, rows = np.concatenate(self._held), np.concatenate(self._rows)
        self._rows.clear()  # which may be as much memory again
        if self._damaged:
            self._forget_what_is_missing(held, rows)
        names = Names(
            places=self._places, sites=self._sites, tasks=self._tasks, tags=self._tags, threads=self._threads,
            pools=self._pools,
        )  # fmt: skip
        for some in (held, rows):
            _need_sound(some, names)
        heading = self._heading
        if heading is None and not (self._damaged and len(rows)):
            raise BadTrace("nothing", "a file of records (.amem)")
        began = int(rows["time_ns"].min()) if heading is None else heading.began
        ended = int(rows["time_ns"].max(initial=began)) if self._ended is None else self._ended
        if self._ended is None:
            self._missing[_GAPS_OPEN] = bool(self._gaps) and not self._damaged
        else:
            self._missing[_GAPS] = bool(self._gaps)
            open_ended = range(len(self._pools)) if self._damaged else self._cut
            gaps = [*self._gaps, *((pool, ended) for pool in open_ended)]
            rows = bridged(rows, held, gaps) if gaps else rows
        return Records(
            in_order(held, rows, began), names, began=began, wall=0.0 if heading is None else heading.wall, ended=ended,
            lost=sum(self._lost.values()), note=" ".join(sentence for sentence, true in self._missing.items() if true),
            origin=Origin() if heading is None else _origin(heading),
            end_known=self._knows_end(),
        )  # fmt: skip

    def _knows_end(self) -> bool:
        if self._damaged:
            return self._ended is not None and self._listed.issuperset(range(len(self._pools)))
        return self._ended is not None or not self._gaps

    def _forget_what_is_missing(self, *tables: NDArray[np.void]) -> None:
        """Let rows name nothing where their names are missing."""
        for rows in tables:
            for column, known in (("site", self._sites), ("task", self._tasks), ("tag", self._tags)):
                rows[column][rows[column] >= len(known)] = 0
            _extend(self._pools, int(rows["pool"].max(initial=0)) + 1, _NO_POOL)
        self._sites = [
            (place, caller) if place < len(self._places) and caller < max(number, 1) else (0, 0)
            for number, (place, caller) in enumerate(self._sites)
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
    for kind, end in _LEVELS.items():
        _need_below(end, rows["level"][rows["kind"] == kind], "level")
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
