"""Which streams touched which bytes last: a map of address ranges that splits and merges as it is written."""

import bisect
from dataclasses import dataclass, field, replace


@dataclass(slots=True)
class Cell:
    """A range of mapped bytes with one history, in stamps (stream, count of that stream's work)."""

    start: int
    end: int
    birth: tuple[int, int] | None = None
    """From where on it is usable; None once it has been written, or for everybody."""
    write: tuple[int, int] | None = None
    """The last write."""
    reads: dict[int, int] = field(default_factory=dict)
    """The last read of each stream since then."""


class RangeMap:
    """The mapped ranges, in address order and without overlap."""

    def __init__(self) -> None:
        """Begin with nothing mapped."""
        self._starts: list[int] = []
        self._cells: list[Cell] = []

    def add(self, cell: Cell) -> None:
        """Map a range that is not mapped yet."""
        at = bisect.bisect_left(self._starts, cell.start)
        self._starts.insert(at, cell.start)
        self._cells.insert(at, cell)

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
        self._starts[first:last] = [cell.start] if cell else []

    def _span(self, start: int, end: int) -> tuple[int, int]:
        self._cut(start)
        self._cut(end)
        return bisect.bisect_left(self._starts, start), bisect.bisect_left(self._starts, end)

    def _cut(self, address: int) -> None:
        at = bisect.bisect_right(self._starts, address) - 1
        if at < 0:
            return
        cell = self._cells[at]
        if cell.start < address < cell.end:
            rest = replace(cell, start=address, reads=dict(cell.reads))
            cell.end = address
            self._starts.insert(at + 1, address)
            self._cells.insert(at + 1, rest)
