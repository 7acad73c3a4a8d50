"""`segments`: what was reserved of the device, and what lay in it; `memory_map`: as much of it as a screen can show."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from asyncmem.core import Kind
from asyncmem.figures import format_count, format_duration, format_size
from asyncmem.insight.groups import parts
from asyncmem.insight.records import Records
from asyncmem.insight.reports.display import drawing

MOST_ROWS: Final = 40
"""So many segments are shown: the largest."""

CELLS: Final = 1000
"""Parts of the longest row that are distinguished: about as many as a screen has columns for it."""


_CELLS: Final = 48  # of a segment drawn in text


class Piece(NamedTuple):
    """A buffer in its segment.

    Attributes:
        offset: Where it begins, in bytes from the segment's beginning.
        nbytes: Its bytes, as they were asked for.
        tag: What it was allocated under.
    """

    offset: int
    nbytes: int
    tag: str | None


class Segment(NamedTuple):
    """A range of the device's memory.

    Attributes:
        pool: The name of its pool.
        address: Where it begins.
        nbytes: Its bytes.
        since: When it came, in seconds from the beginning.
        live: Bytes in it that were held.
        largest_hole: Bytes of its largest free piece.
        pieces: The buffers in it, by their places; of a `MemoryMap` its blocks are instead.
    """

    pool: str
    address: int
    nbytes: int
    since: float
    live: int
    largest_hole: int
    pieces: tuple[Piece, ...] = ()


@final
@dataclass(frozen=True, kw_only=True)
class Segments:
    """What was reserved at a time. Memory by pages has no segments.

    Attributes:
        time: When, in seconds from the beginning.
        segments: By pools and addresses.
    """

    time: float
    segments: tuple[Segment, ...]

    def _repr_html_(self) -> str:
        lines = (f"{map_of(one)}  {format_size(one.nbytes)} of {one.pool}" for one in self.segments[:MOST_ROWS])
        nbytes = format_size(sum(one.nbytes for one in self.segments))
        count = format_count(len(self.segments), "segment")
        return drawing([f"{nbytes} in {count} after {format_duration(self.time)}", *lines])


class Block(NamedTuple):
    """A buffer, or several that lie so near to each other that a screen would not tell them apart.

    Attributes:
        row: The number of the segment that it lies in.
        left: Where it begins in that, in bytes.
        right: Where it ends in that.
        tag: What most of its bytes were allocated under.
        tags: How many tags it has.
        buffers: How many buffers it is.
        nbytes: Their bytes; what is left of its length lies between them.
    """

    row: int
    left: int
    right: int
    tag: str | None
    tags: int
    buffers: int
    nbytes: int


@final
@dataclass(frozen=True, kw_only=True)
class MemoryMap:
    """Segments and what lay in them at a time. Memory by pages has no segments.

    Attributes:
        time: When, in seconds from the beginning.
        rows: The segments that are shown, by pools and addresses.
        blocks: What lay in them. All holes lie between blocks, but those that a screen could not show.
        left_out: How many smaller segments are not shown.
        left_out_bytes: Their bytes.
    """

    time: float
    rows: tuple[Segment, ...]
    blocks: tuple[Block, ...]
    left_out: int
    left_out_bytes: int


def segments(records: Records, time: float | None = None) -> Segments:
    """Return the segments there were, and what lay in them.

    Args:
        records: What happened.
        time: When, in seconds from the beginning; when the most was live without it.
    """
    when = records.peak().time if time is None else time
    found = []
    for segment, rows in _segments(records, when):
        offsets, tags = (rows["address"] - segment.address).tolist(), map(records.names.tag, rows["tag"].tolist())
        found.append(segment._replace(pieces=tuple(map(Piece, offsets, rows["nbytes"].tolist(), tags))))
    return Segments(time=when, segments=tuple(found))


def _segments(records: Records, when: float) -> Iterator[tuple[Segment, NDArray[np.void]]]:
    """Return the segments there were at a time, by pools and addresses, each with the rows of what was live in it."""
    live = records.live_at(when).rows
    of_pool = dict(parts(live[np.argsort(live["address"], kind="stable")], "pool"))
    addresses = {pool: inside["address"].copy() for pool, inside in of_pool.items()}  # side by side, for each search
    for (pool, address), (nbytes, since) in sorted(_there(records, when).items()):
        inside, starts = of_pool.get(pool, live[:0]), addresses.get(pool, live["address"][:0])
        first, last = starts.searchsorted(np.array([address, address + nbytes], np.uint64)).tolist()
        rows = inside[first:last]
        sizes, offsets = rows["nbytes"].astype(np.int64), (rows["address"] - address).astype(np.int64)
        hole = int((np.append(offsets, nbytes) - np.append(0, offsets + sizes)).max(initial=0))
        yield Segment(records.names.pool(pool), address, nbytes, since, int(sizes.sum()), hole), rows


def _there(records: Records, when: float) -> dict[tuple[int, int], tuple[int, float]]:
    """Return size and time of each segment that is there at a time, by its pool and address."""
    rows = records.of(Kind.GREW, Kind.TRIMMED).rows
    rows = rows[(rows["time_ns"] <= records.began + round(when * 1e9)) & (rows["address"] != 0)]
    there: dict[tuple[int, int], tuple[int, float]] = {}
    columns = (rows[name].tolist() for name in ("kind", "pool", "address", "nbytes", "time_ns"))
    for kind, pool, address, nbytes, time in zip(*columns, strict=True):
        if kind == Kind.GREW:
            there[pool, address] = nbytes, (time - records.began) / 1e9
        else:
            there.pop((pool, address), None)
    return there


def memory_map(records: Records, time: float | None = None) -> MemoryMap:
    """Return where buffers lay.

    Args:
        records: What happened.
        time: When, in seconds from the beginning; when the most was live without it.
    """
    when = records.peak().time if time is None else time
    found = list(_segments(records, when))
    by_size = sorted(range(len(found)), key=lambda at: -found[at][0].nbytes)
    shown = [found[at] for at in sorted(by_size[:MOST_ROWS])]
    left_out = [found[at][0].nbytes for at in by_size[MOST_ROWS:]]
    cell = max((1, *(segment.nbytes // CELLS for segment, _ in shown)))
    return MemoryMap(
        time=when,
        rows=tuple(segment for segment, _ in shown),
        blocks=tuple(block for row, one in enumerate(shown) for block in _blocks(records, row, *one, cell)),
        left_out=len(left_out),
        left_out_bytes=sum(left_out),
    )


def _blocks(records: Records, row: int, segment: Segment, rows: NDArray[np.void], cell: int) -> Iterator[Block]:
    if not len(rows):
        return
    lefts = (rows["address"] - segment.address).astype(np.int64)
    sizes = rows["nbytes"].astype(np.int64)
    begins = (np.diff(lefts // cell, prepend=-1) != 0) | (sizes >= cell)  # a large one is by itself
    starts = np.flatnonzero(begins)
    columns = (
        lefts[starts], np.maximum.reduceat(lefts + sizes, starts), *_of_most(np.cumsum(begins), rows["tag"], sizes),
        np.diff(starts, append=len(rows)), np.add.reduceat(sizes, starts),
    )  # fmt: skip
    for left, right, tag, number, buffers, nbytes in zip(*(one.tolist() for one in columns), strict=True):
        yield Block(row, left, right, records.names.tag(tag), number, buffers, nbytes)


def _of_most(
    cells: NDArray[np.int64], tags: NDArray[np.uint32], sizes: NDArray[np.int64]
) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
    """Return the tag that most bytes of each cell have, and how many tags there are in it."""
    order = np.lexsort((tags, cells))
    cells, tags = cells[order], tags[order]
    pairs = np.flatnonzero(np.diff(cells, prepend=-1) | np.diff(tags.astype(np.int64), prepend=-1))
    sums, cells, tags = np.add.reduceat(sizes[order], pairs), cells[pairs], tags[pairs]
    last = np.flatnonzero(np.diff(cells, append=-1))
    return tags[np.lexsort((sums, cells))][last], np.diff(last, prepend=-1)


def map_of(segment: Segment) -> str:
    """Draw what lay in a segment: in use, in use in part, or a hole."""
    held = [0.0] * _CELLS
    for piece in segment.pieces:
        first, last = (at * _CELLS / segment.nbytes for at in (piece.offset, piece.offset + piece.nbytes))
        for cell in range(int(first), min(int(last) + 1, _CELLS)):
            held[cell] += max(min(last, cell + 1) - max(first, cell), 0.0)
    return "".join("█" if share > 0.99 else "░" if share else "·" for share in held)
