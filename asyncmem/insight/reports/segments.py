"""`segments`: what was had from the device, and what lay in it; `memory_map`: as much of it as a screen can show."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple, final

import numpy as np

from asyncmem.core import Kind
from asyncmem.insight.groups import parts

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from asyncmem.insight.records import Records


MOST_ROWS: Final = 40
"""So many segments are shown: the largest."""

CELLS: Final = 1000
"""So many parts of the longest row are told apart, about as many as a screen has columns for it."""


class Piece(NamedTuple):
    """A buffer in its segment."""

    offset: int
    """Where it begins, in bytes from the segment's beginning."""
    nbytes: int
    """Its bytes, as they were asked for."""
    tag: str | None
    """What it was allocated under."""


class Segment(NamedTuple):
    """A range of the device's memory."""

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
    """Bytes of its largest free piece."""
    pieces: tuple[Piece, ...]
    """The buffers in it, by their places."""


@final
@dataclass(frozen=True, kw_only=True)
class Segments:
    """What was had from the device at a time. Memory by pages has no segments."""

    time: float
    """When, in seconds from the beginning."""
    segments: tuple[Segment, ...]
    """By pools and addresses."""


class Place(NamedTuple):
    """A segment, and what lay in it as columns."""

    pool: str
    """Whose it is."""
    address: int
    """Where it begins."""
    nbytes: int
    """Its bytes."""
    since: float
    """When it came, in seconds from the beginning."""
    rows: NDArray[np.void]
    """The records of what was live in it, by addresses."""

    @property
    def live(self) -> int:
        """Bytes in it that were held."""
        return int(self.rows["nbytes"].sum())

    def largest_hole(self) -> int:
        """Return the bytes of its largest free piece."""
        starts = (self.rows["address"] - self.address).astype(np.int64)
        ends = starts + self.rows["nbytes"].astype(np.int64)
        return int((np.append(starts, self.nbytes) - np.append(0, ends)).max(initial=0))


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
    rows: tuple[Place, ...]
    """The segments that are shown, by pools and addresses."""
    blocks: tuple[Block, ...]
    """What lay in them. All holes lie between blocks, but those that a screen could not show."""
    left_out: int
    """How many smaller segments are not shown,"""
    left_out_bytes: int
    """and their bytes."""


def segments(records: Records, time: float | None = None) -> Segments:
    """Return the segments there were, and what lay in them.

    Args:
        records: What happened.
        time: When, in seconds from the beginning; when the most was live without it.
    """
    when = records.peak().time if time is None else time
    return Segments(time=when, segments=tuple(_segment(records, place) for place in _places(records, when)))


def _places(records: Records, when: float) -> Iterator[Place]:
    """Return the segments there were at a time, by pools and addresses, each with what was live in it."""
    live = records.live_at(when).rows
    of_pool = dict(parts(live[np.argsort(live["address"], kind="stable")], "pool"))
    addresses = {pool: inside["address"].copy() for pool, inside in of_pool.items()}  # side by side, for each search
    for (pool, address), (nbytes, since) in sorted(_there(records, when).items()):
        inside, starts = of_pool.get(pool, live[:0]), addresses.get(pool, live["address"][:0])
        first, last = starts.searchsorted(np.array([address, address + nbytes], np.uint64)).tolist()
        yield Place(records.names.pools[pool].name, address, nbytes, since, inside[first:last])


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


def _segment(records: Records, place: Place) -> Segment:
    columns = ((place.rows[name] - shift).tolist() for name, shift in (("address", place.address), ("nbytes", 0)))
    tags = (records.names.tag(tag) for tag in place.rows["tag"].tolist())
    pieces = tuple(Piece(*one) for one in zip(*columns, tags, strict=True))
    return Segment(place.pool, place.address, place.nbytes, place.since, place.live, place.largest_hole(), pieces)


def memory_map(records: Records, time: float | None = None) -> MemoryMap:
    """Return where buffers lay.

    Args:
        records: What happened.
        time: When, in seconds from the beginning; when the most was live without it.
    """
    when = records.peak().time if time is None else time
    found = list(_places(records, when))
    shown = _largest(found)
    cell = max((one.nbytes for one in shown), default=0) // CELLS
    return MemoryMap(
        time=when,
        rows=tuple(shown),
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
    """Return the tag that most bytes of each cell have, and how many tags there are in it."""
    order = np.lexsort((tags, cells))
    cells, tags = cells[order], tags[order]
    pairs = np.flatnonzero(np.diff(cells, prepend=-1) | np.diff(tags.astype(np.int64), prepend=-1))
    sums, cells, tags = np.add.reduceat(sizes[order], pairs), cells[pairs], tags[pairs]
    last = np.flatnonzero(np.diff(cells, append=-1))
    return tags[np.lexsort((sums, cells))][last], np.diff(last, prepend=-1)
