"""`segments`: what was had from the device, and what lay in it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, final

import numpy as np

from asyncmem.core import Kind
from asyncmem.insight.reports.parts import parts

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from asyncmem.insight.records import Records


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
    """Bytes of its largest piece that nobody held."""
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


def segments(records: Records, time: float | None = None) -> Segments:
    """Answer the segments there were, and what lay in them.

    Args:
        records: What happened.
        time: When, in seconds from the beginning; when the most was live without it.
    """
    when = records.peak().time if time is None else time
    live = records.live_at(when).rows
    of_pool = dict(parts(live[np.argsort(live["address"], kind="stable")], "pool"))
    found = [
        _segment(records, number, address, *grown, of_pool.get(number, live[:0]))
        for (number, address), grown in sorted(_there(records, when).items())
    ]
    return Segments(time=when, segments=tuple(found))


def _there(records: Records, when: float) -> dict[tuple[int, int], tuple[int, float]]:
    """Answer size and time of each segment that is there at a time, by its pool and address."""
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


def _segment(records: Records, pool: int, address: int, nbytes: int, since: float, live: NDArray[np.void]) -> Segment:
    first, last = np.searchsorted(live["address"], [address, address + nbytes]).tolist()
    rows = live[first:last]
    columns = (rows[name].tolist() for name in ("address", "nbytes", "tag"))
    pieces = tuple(Piece(at - address, size, records.names.tag(tag)) for at, size, tag in zip(*columns, strict=True))
    starts = [piece.offset for piece in pieces] + [nbytes]
    ends = [0] + [piece.offset + piece.nbytes for piece in pieces]
    hole = max(start - end for start, end in zip(starts, ends, strict=True))
    held = sum(piece.nbytes for piece in pieces)
    return Segment(records.names.pools[pool].name, address, nbytes, since, held, max(hole, 0), pieces)
