"""Find memory that two streams touch without order between them, whatever the timing of this run.

Each stream has a vector clock: for every stream, how much of that stream's work is certain to be complete before its
own next work starts. Work counts up; a fence is a copy of the clock; waiting for a fence takes the maximum, and so does
all work submitted after the host saw a fence done. What merely happened to be finished in time orders nothing, so
a missing wait is found even when it would have gone well.
"""

import bisect
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Final, TypeAlias

from asyncmem.errors import AsyncmemError


@dataclass(slots=True)
class Cell:
    """A range of mapped bytes with one history, in stamps (stream, count of that stream's work)."""

    start: int
    end: int
    birth: tuple[int, int] | None = None
    """From where on it is usable; None once it has been written, or for all streams."""
    write: tuple[int, int] | None = None
    """The last write."""
    reads: dict[int, int] = field(default_factory=dict)
    """The last read of each stream since then."""
    moved: bool = False
    """Whether the memory is used at another address by now."""


_START: Final = attrgetter("start")


class RangeMap:
    """The mapped ranges, in address order and without overlap."""

    def __init__(self) -> None:
        """Begin with nothing mapped."""
        self._cells: list[Cell] = []

    def add(self, cell: Cell) -> None:
        """Map a range that is not mapped yet."""
        bisect.insort(self._cells, cell, key=_START)

    def cells(self, start: int, end: int) -> list[Cell]:
        """Return the cells of exactly [start, end), cut at its edges; an empty list if a byte of it is not mapped."""
        first, last = self._span(start, end)
        cells = self._cells[first:last]
        ends = [start, *(cell.end for cell in cells)]
        whole = all(cell.start == end for cell, end in zip(cells, ends, strict=False)) and ends[-1] == end
        return cells if whole else []

    def replace(self, start: int, end: int, cell: Cell | None) -> None:
        """Put one cell, or nothing, in the place of all cells of [start, end)."""
        first, last = self._span(start, end)
        self._cells[first:last] = [cell] if cell else []

    def _span(self, start: int, end: int) -> tuple[int, int]:
        self._cut(start)
        self._cut(end)
        first = bisect.bisect_left(self._cells, start, key=_START)
        return first, bisect.bisect_left(self._cells, end, first, key=_START)

    def _cut(self, address: int) -> None:
        at = bisect.bisect_right(self._cells, address, key=_START) - 1
        if at < 0:
            return
        cell = self._cells[at]
        if cell.start < address < cell.end:
            rest = Cell(address, cell.end, cell.birth, cell.write, dict(cell.reads), cell.moved)
            # Without a call, after which an interrupt could come: all of it is done, or nothing.
            cell.end = address
            self._cells[at + 1 : at + 1] = [rest]


Moment: TypeAlias = Mapping[int, int]
"""A vector clock that does not change: {stream: pieces of its work that are complete by then}."""


class StreamOrderError(AsyncmemError):
    """Two streams use the same memory without order between them, or memory was used that is not there."""

    __module__ = "asyncmem"

    def __init__(self, problem: str, *, address: int, nbytes: int, stream: str = "", other: str = "") -> None:
        """Take what is wrong, the range, the stream that did it, and the one whose work it did not wait for."""
        self.address = address
        self.nbytes = nbytes
        self.stream = stream
        self.other = other
        super().__init__(f"{nbytes} bytes at {address:#x}: {problem}")


class OrderChecker:
    """Follows all work of a device. Not safe for threads; the device calls it under its own lock."""

    def __init__(self, *, strict: bool = True) -> None:
        """Begin with no memory mapped and nothing done. One that is not `strict` raises nothing."""
        self.strict = strict
        self._ranges = RangeMap()
        self._names: dict[int, str] = {}
        self._clocks: dict[int, dict[int, int]] = {}
        self._host: dict[int, int] = {}

    def add_stream(self, stream: int, name: str) -> None:
        """Follow a stream from now on."""
        self._names[stream] = name
        self._clocks[stream] = {}

    def begin(self, stream: int) -> None:
        """Note that one piece of work is submitted; its touches follow."""
        clock = self._clocks[stream]
        _advance(clock, self._host)
        clock[stream] = clock.get(stream, 0) + 1

    def touch(self, stream: int, address: int, nbytes: int, *, write: bool) -> None:
        """Note that the work begun last on `stream` reads or writes a range.

        Raises:
            StreamOrderError: It is not mapped, or another stream's use of it is not certain to be over.
        """
        if nbytes == 0:
            return
        cells = self._ranges.cells(address, address + nbytes)
        if not cells:
            self._fail("used, but not in any segment,", address, nbytes, stream)
        for cell in cells:
            self._check(cell, stream, write)
            if cell.moved:
                self._fail("used where its memory was before it moved", address, nbytes, stream)
        now = self._clocks[stream][stream]
        if write:
            self._ranges.replace(address, address + nbytes, Cell(address, address + nbytes, write=(stream, now)))
        else:
            for cell in cells:
                cell.reads[stream] = now

    def record(self, stream: int) -> Moment:
        """Return what is complete once all work submitted to `stream` so far is."""
        return dict(self._clocks[stream])

    def record_all(self) -> Moment:
        """Return what is complete once all work of all streams is."""
        moment: dict[int, int] = {}
        for clock in self._clocks.values():
            _advance(moment, clock)
        return moment

    def wait(self, stream: int, moment: Moment) -> None:
        """Order the later work of `stream` behind a fence."""
        _advance(self._clocks[stream], moment)

    def seen(self, moment: Moment) -> None:
        """Note that the host saw a fence done: all work submitted from now on comes later."""
        _advance(self._host, moment)

    def map(self, address: int, nbytes: int, stream: int | None) -> None:
        """Note a new segment; with `stream`, others use it only behind a fence that this stream records from now on."""
        cell = Cell(address, address + nbytes)
        if stream is not None:
            self.begin(stream)
            cell.birth = (stream, self._clocks[stream][stream])
        self._ranges.add(cell)

    def move(self, address: int, nbytes: int, to: int) -> None:
        """Note that memory is used at another address from now on, in order with all that was done at this one."""
        for cell in self._ranges.cells(address, address + nbytes):
            start, end = cell.start - address + to, cell.end - address + to
            self._ranges.add(replace(cell, start=start, end=end, reads=dict(cell.reads)))
            cell.moved = True

    def unmap(self, address: int, nbytes: int) -> None:
        """Note that a segment goes back to the driver, which asks no stream.

        Raises:
            StreamOrderError: The host has not seen all work on it done.
        """
        for cell in self._ranges.cells(address, address + nbytes):
            for stream, count in _uses(cell, reads=True):
                if self._host.get(stream, 0) < count:
                    self._fail("given back before the host saw the work on it done", address, nbytes, other=stream)
        self._ranges.replace(address, address + nbytes, None)

    def _check(self, cell: Cell, stream: int, write: bool) -> None:
        clock = self._clocks[stream]
        begun = [] if cell.birth is None else [cell.birth]
        for other, count in begun + _uses(cell, reads=write):
            if clock.get(other, 0) < count:
                self._fail("used out of order", cell.start, cell.end - cell.start, stream, other)

    def _fail(self, what: str, address: int, nbytes: int, stream: int | None = None, other: int | None = None) -> None:
        if not self.strict:
            return
        doer = "" if stream is None else self._names[stream]
        earlier = "" if other is None else self._names[other]
        by = f" by stream {doer!r}" if doer else ""
        after = f"; nothing orders this behind the work of stream {earlier!r}" if earlier else ""
        raise StreamOrderError(f"{what}{by}{after}", address=address, nbytes=nbytes, stream=doer, other=earlier)


def _uses(cell: Cell, *, reads: bool) -> list[tuple[int, int]]:
    uses = [] if cell.write is None else [cell.write]
    return [*uses, *cell.reads.items()] if reads else uses


def _advance(clock: dict[int, int], moment: Moment) -> None:
    for stream, count in moment.items():
        if clock.get(stream, 0) < count:
            clock[stream] = count
