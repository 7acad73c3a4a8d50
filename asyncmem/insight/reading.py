"""`read`: the records of a file, of one that was never finished too."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from asyncmem.errors import BadTrace
from asyncmem.insight.names import Names, PoolName, Site
from asyncmem.insight.needs import need_msgspec
from asyncmem.insight.order import ROW, bridged, in_order
from asyncmem.insight.records import Records
from asyncmem.insight.soundness import need_sound

if TYPE_CHECKING:
    from os import PathLike

    from numpy.typing import NDArray

    from asyncmem.insight.amem import Block, Heading, NewNames, Rows

_TORN: Final = "The file ends in the middle: what came after it is missing."
_UNFINISHED: Final = "The recording was not ended: its process died, or it goes on."
_UNKNOWN: Final = "Parts of it are of a newer asyncmem, and were left out."
_GAPS: Final = "Records were lost on the way: what was freed among them is taken as freed where they go on."
_GAPS_OPEN: Final = "Records were lost on the way: what was freed among them counts as live."
_CUT: Final = "There was no memory for more records."


def read(path: str | PathLike[str]) -> Records:
    """Read a file of records, ``.amem``.

    Of one whose process died, all is read up to the last block that is whole; `Records.note` says what is missing.

    Raises:
        BadTrace: It is no such file, or of a version that this asyncmem does not know.
        ModuleNotFoundError: The extra `insight` is not installed.
        OSError: It cannot be read.
    """
    need_msgspec("reading a file of records")
    from asyncmem.insight.amem import MAGIC, unpack

    found = _Found(str(path))
    with Path(path).open("rb") as file:
        if file.read(len(MAGIC)) != MAGIC:
            raise BadTrace("something else", "a file of records (.amem)", file=str(path))
        try:
            for block in unpack(file):
                found.take(block)
        except EOFError:
            found.missing[_TORN] = True
    return found.records()


class _Found:
    """What the blocks of a file have said so far."""

    def __init__(self, path: str) -> None:
        self._path = path
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
        self._cut: set[int] = set()  # pools of which later ones are missing
        self._ended: int | None = None
        self.missing = {_TORN: False, _UNFINISHED: True, _UNKNOWN: False, _GAPS: False, _GAPS_OPEN: False, _CUT: False}

    def take(self, block: Block | None) -> None:
        """Read the next block; None for one of an unknown kind."""
        from asyncmem.insight.amem import VERSION, End, Heading, NewNames, Pool

        if isinstance(block, Heading) and block.version != VERSION:
            raise BadTrace(f"version {block.version}", f"version {VERSION}", file=self._path)
        match block:
            case None:
                self.missing[_UNKNOWN] = True
            case Heading():
                self._heading = block
            case Pool():
                self._pools.append(PoolName(block.name, block.device, block.limit))
            case NewNames():
                self._learn(block)
            case End():
                self.missing[_UNFINISHED] = False
                self._ended = block.time
            case _:
                self._add(block)

    def _learn(self, names: NewNames) -> None:
        self._places += (None if _is_start(place) else Site(*place) for place in names.places)
        self._sites += names.sites
        self._tasks += names.tasks
        self._tags += names.tags
        for number, name in names.threads.items():
            self._threads += [None] * (number + 1 - len(self._threads))
            self._threads[number] = name

    def _add(self, block: Rows) -> None:
        from asyncmem.insight.amem import unpack_rows

        try:
            rows = unpack_rows(block, ROW)
        except (MemoryError, OverflowError, ValueError, zlib.error) as error:
            raise BadTrace(f"damaged rows ({error})", f"{block.count:,} of them", file=self._path) from error
        (self._held if block.held else self._rows).append(rows)
        if block.lost > self._lost.get(block.pool, 0) and len(rows):
            self._gaps.append((block.pool, int(rows["time_ns"][0])))
        self._lost[block.pool] = max(self._lost.get(block.pool, 0), block.lost)
        if block.cut:
            self.missing[_CUT] = True
            self._cut.add(block.pool)

    def records(self) -> Records:
        """Answer all of it."""
        if self._heading is None:
            raise BadTrace("nothing", "a file of records (.amem)", file=self._path)
        lost = sum(self._lost.values())
        began = self._heading.began
        names = Names(
            places=self._places, sites=self._sites, tasks=self._tasks, tags=self._tags, threads=self._threads,
            pools=self._pools,
        )  # fmt: skip
        held, rows = np.concatenate(self._held), np.concatenate(self._rows)
        self._rows.clear()  # which may be as much memory again
        for told in (held, rows):
            need_sound(told, names, self._path)
        if self._ended is None:
            self._ended = int(rows["time_ns"].max(initial=began))
            self.missing[_GAPS_OPEN] = bool(self._gaps)
        else:
            self.missing[_GAPS] = bool(self._gaps)
            gaps = [*self._gaps, *((pool, self._ended) for pool in self._cut)]
            rows = bridged(rows, held, gaps) if gaps else rows
        rows = in_order(held, rows, began)
        note = " ".join(sentence for sentence, true in self.missing.items() if true)
        return Records(rows, names, began=began, wall=self._heading.wall, ended=self._ended, lost=lost, note=note)


def _is_start(place: tuple[str, int, str]) -> bool:
    """Whether this is where ``asyncmem run`` runs a program: who called that is not the program's."""
    file, _, function = place
    return function == "Program.run" and Path(file).parts[-3:] == ("asyncmem", "cli", "program.py")
