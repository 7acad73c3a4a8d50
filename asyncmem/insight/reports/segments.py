"""`segments`: what was had from the device, and what lay in it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, final

import numpy as np

from asyncmem.core import Kind
from asyncmem.insight.reports.parts import parts

if TYPE_CHECKING:
    from collections.abc import Iterator

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
        """Answer the bytes of its largest piece that nobody held."""
        starts = (self.rows["address"] - self.address).astype(np.int64)
        ends = starts + self.rows["nbytes"].astype(np.int64)
        return int((np.append(starts, self.nbytes) - np.append(0, ends)).max(initial=0))


def segments(records: Records, time: float | None = None) -> Segments:
    """Answer the segments there were, and what lay in them.

    Args:
        records: What happened.
        time: When, in seconds from the beginning; when the most was live without it.
    """
    when = records.peak().time if time is None else time
    return Segments(time=when, segments=tuple(_segment(records, place) for place in places(records, when)))


def places(records: Records, when: float) -> Iterator[Place]:
    """Answer the segments there were at a time, by pools and addresses, each with what was live in it."""
    live = records.live_at(when).rows
    of_pool = dict(parts(live[np.argsort(live["address"], kind="stable")], "pool"))
    for (pool, address), (nbytes, since) in sorted(_there(records, when).items()):
        inside = of_pool.get(pool, live[:0])
        first, last = np.searchsorted(inside["address"], [address, address + nbytes]).tolist()
        yield Place(records.names.pools[pool].name, address, nbytes, since, inside[first:last])


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


def _segment(records: Records, place: Place) -> Segment:
    columns = ((place.rows[name] - shift).tolist() for name, shift in (("address", place.address), ("nbytes", 0)))
    tags = (records.names.tag(tag) for tag in place.rows["tag"].tolist())
    pieces = tuple(Piece(*one) for one in zip(*columns, tags, strict=True))
    return Segment(place.pool, place.address, place.nbytes, place.since, place.live, place.largest_hole(), pieces)
