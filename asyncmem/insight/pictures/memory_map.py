"""Where buffers lay in the segments at a time, and where the holes were."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple, final

import numpy as np

from asyncmem.insight.reports.segments import places

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from asyncmem.insight.records import Records
    from asyncmem.insight.reports.segments import Place

MOST_ROWS: Final = 40
"""So many segments are shown: the largest."""

CELLS: Final = 1000
"""So many parts of the longest row are told apart, about as many as a screen has columns for it."""


class Row(NamedTuple):
    """A segment."""

    pool: str
    """Whose it is."""
    address: int
    """Where it begins."""
    nbytes: int
    """Its bytes."""
    since: float
    """When it came, in seconds from the beginning."""
    live: int
    """Bytes in it that were held."""
    largest_hole: int
    """Bytes of its largest piece that nobody held."""


class Block(NamedTuple):
    """A buffer, or several that lie so near to each other that a screen would not tell them apart."""

    row: int
    """The number of the segment that it lies in."""
    left: int
    """Where it begins in that, in bytes,"""
    right: int
    """and where it ends."""
    tag: str | None
    """What most of its bytes were allocated under."""
    tags: int
    """How many tags it has,"""
    buffers: int
    """how many buffers it is,"""
    nbytes: int
    """and their bytes; what is left of its length lies between them."""


@final
@dataclass(frozen=True, kw_only=True)
class MemoryMap:
    """Segments and what lay in them at a time. Memory by pages has no segments."""

    time: float
    """When, in seconds from the beginning."""
    rows: tuple[Row, ...]
    """The segments that are shown, by pools and addresses."""
    blocks: tuple[Block, ...]
    """What lay in them. All holes lie between blocks, but those that a screen could not show."""
    left_out: int
    """How many smaller segments are not shown,"""
    left_out_bytes: int
    """and their bytes."""


def memory_map(records: Records, time: float | None = None) -> MemoryMap:
    """Answer where buffers lay.

    Args:
        records: What happened.
        time: When, in seconds from the beginning; when the most was live without it.
    """
    when = records.peak().time if time is None else time
    found = list(places(records, when))
    shown = _largest(found)
    cell = max((one.nbytes for one in shown), default=0) // CELLS
    return MemoryMap(
        time=when,
        rows=tuple(Row(*one[:4], one.live, one.largest_hole()) for one in shown),
        blocks=tuple(block for row, one in enumerate(shown) for block in _blocks(records, row, one, cell)),
        left_out=len(found) - len(shown),
        left_out_bytes=sum(one.nbytes for one in found) - sum(one.nbytes for one in shown),
    )


def _largest(found: list[Place]) -> list[Place]:
    by_size = sorted(range(len(found)), key=lambda at: -found[at].nbytes)
    return [found[at] for at in sorted(by_size[:MOST_ROWS])]


def _blocks(records: Records, row: int, place: Place, cell: int) -> Iterator[Block]:
    lefts = (place.rows["address"] - place.address).astype(np.int64)
    sizes, tags = place.rows["nbytes"].astype(np.int64), place.rows["tag"]
    large = sizes >= cell
    for left, size, tag in zip(lefts[large].tolist(), sizes[large].tolist(), tags[large].tolist(), strict=True):
        yield Block(row, left, left + size, records.names.tag(tag), 1, 1, size)
    lefts, sizes, tags = lefts[~large], sizes[~large], tags[~large]
    if not len(lefts):
        return
    cells = lefts // cell
    starts = np.flatnonzero(np.diff(cells, prepend=-1))
    columns = (
        lefts[starts], np.maximum.reduceat(lefts + sizes, starts), *_of_most(cells, tags, sizes),
        np.diff(starts, append=len(lefts)), np.add.reduceat(sizes, starts),
    )  # fmt: skip
    for left, right, tag, number, buffers, nbytes in zip(*(one.tolist() for one in columns), strict=True):
        yield Block(row, left, right, records.names.tag(tag), number, buffers, nbytes)


def _of_most(
    cells: NDArray[np.int64], tags: NDArray[np.uint32], sizes: NDArray[np.int64]
) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
    """Answer the tag that most bytes of each cell have, and how many tags there are in it."""
    order = np.lexsort((tags, cells))
    cells, tags = cells[order], tags[order]
    pairs = np.flatnonzero(np.diff(cells, prepend=-1) | np.diff(tags.astype(np.int64), prepend=-1))
    sums, cells, tags = np.add.reduceat(sizes[order], pairs), cells[pairs], tags[pairs]
    last = np.flatnonzero(np.diff(cells, append=-1))
    return tags[np.lexsort((sums, cells))][last], np.diff(last, prepend=-1)
