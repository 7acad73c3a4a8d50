"""`timeline`: how much was live and reserved, from the beginning to the end; what a picture shows of it.

A picture has fewer moments than there were, and loses no extreme: see `LiveByTag`.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Final, NamedTuple, final

import numpy as np

from asyncmem.core import Kind
from asyncmem.errors import InvalidRequest
from asyncmem.insight.rows import change_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from numpy.typing import NDArray

    from asyncmem.insight.records import Records

MOST_MOMENTS: Final = 100_000

PARTS: Final = 1000
"""In how many parts a picture cuts the time: about as many as a screen has columns for it."""

MOST_TAGS: Final = 8
"""So many tags have a band of their own, as the eye tells so many colours apart."""

NO_TAG: Final = "no tag"
OTHERS: Final = "all others"


class Moment(NamedTuple):
    """A part of the time."""

    time: float
    """When it begins, in seconds from the beginning."""
    live: int
    """The most bytes that were live in it,"""
    reserved: int
    """and that were had from the device."""
    waits: int
    """How many requests left the queue in it."""
    out_of_memory: int
    """How many requests were refused in it."""


@final
@dataclass(frozen=True, kw_only=True)
class Timeline:
    """What was live and reserved over time."""

    seconds: float
    """How long was recorded."""
    peak: int
    """The most bytes that were live."""
    limit: int
    """The most bytes that the pools might reserve together."""
    moments: tuple[Moment, ...]
    """The time in parts of the same length."""


class Band(NamedTuple):
    """What was live under a tag."""

    name: str
    """The tag; `NO_TAG` and `OTHERS` for what has none, and for the tags without a band."""
    tag: str | None
    """The tag, None for those two."""
    nbytes: NDArray[np.int64]
    """Bytes at each of the picture's times."""


@final
@dataclass(frozen=True, kw_only=True)
class LiveByTag:
    """What was live and reserved. What a time has, holds until the next one.

    Of many moments those are kept at which something was highest or lowest in its part of the time: the whole, or a
    band. So the peak is there, and every other extreme that a screen could show.
    """

    seconds: float
    """How long was recorded."""
    times: NDArray[np.float64]
    """Moments, in seconds from the beginning."""
    live: NDArray[np.int64]
    """Bytes that were live at each."""
    bands: tuple[Band, ...]
    """Whose they were, what was most over all the time first. They add up to `live`."""
    reserved_times: NDArray[np.float64]
    """When the pools got or gave back memory, likewise,"""
    reserved: NDArray[np.int64]
    """and how much they had then."""
    limit: int
    """How much they might have, together."""


class Marks(NamedTuple):
    """Times during which something happened; those that a screen would not tell apart are one."""

    starts: NDArray[np.float64]
    """When each begins, in seconds from the beginning,"""
    ends: NDArray[np.float64]
    """and when it ends."""
    counts: NDArray[np.int64]
    """How often it happened in between,"""
    nbytes: NDArray[np.int64]
    """for how many bytes together,"""
    largest: NDArray[np.int64]
    """for how many at most,"""
    longest: NDArray[np.float64]
    """and for how many seconds at most."""


def timeline(records: Records, moments: int = 100) -> Timeline:
    """Return how much was live and reserved over time.

    Args:
        records: What happened.
        moments: In how many parts the time is cut. In each the most is looked for, so that no peak is lost.

    Raises:
        InvalidRequest: No such number of parts.
    """
    if not 1 <= moments <= MOST_MOMENTS:
        raise InvalidRequest("moments", moments, f"a number from 1 to {MOST_MOMENTS:,}")
    end = max(round(records.duration * 1e9), 1)
    edges = np.linspace(0, end, moments + 1).astype(np.int64)
    edges[-1] += 1  # what happens at the very end is in the last part
    parts = zip(
        (edges[:-1] / 1e9).tolist(),
        _most(*records.live(), edges),
        _most(*records.reserved(), edges),
        _count(records.of(Kind.WAITED), edges),
        _count(records.of(Kind.OUT_OF_MEMORY), edges),
        strict=True,
    )
    return Timeline(
        seconds=records.duration,
        peak=records.peak().nbytes,
        limit=records.limit,
        moments=tuple(Moment(*part) for part in parts),
    )


def _most(times: NDArray[np.int64], values: NDArray[np.int64], edges: NDArray[np.int64]) -> list[int]:
    """Return the largest value that held in each part, that from before it included."""
    borders = np.searchsorted(times, edges).tolist()
    held = np.concatenate((np.zeros(1, np.int64), values))  # held[i] is what holds before the change i
    return [int(held[first : last + 1].max()) for first, last in pairwise(borders)]


def _count(records: Records, edges: NDArray[np.int64]) -> list[int]:
    counts: list[int] = np.histogram(records.rows["time_ns"] - records.began, edges)[0].tolist()
    return counts


def live_by_tag(records: Records, parts: int = PARTS) -> LiveByTag:
    """Return what was live over time, by tag.

    Args:
        records: What happened.
        parts: In how many parts the time is cut; see `LiveByTag` for what is kept of each.
    """
    rows = records.rows[records.rows["kind"] <= Kind.HELD]
    change = change_of(rows, Kind.FREED)
    times, end = rows["time_ns"] - records.began, round(records.duration * 1e9)
    masks = _Masks(rows["tag"], change)

    def series() -> Iterator[NDArray[np.int64]]:
        yield np.cumsum(change)
        for number in range(len(masks)):
            yield np.cumsum(change * masks[number])

    kept = _extremes(series(), _starts_of_parts(times, end, parts), len(rows))
    live, *found = [_padded(values[kept]) for values in series()]
    names = [*((records.names.tag(number) or NO_TAG) for number in masks.numbers), OTHERS]
    moments = _padded_times(times[kept], end)
    tags = [*(records.names.tag(number) for number in masks.numbers), None]
    bands = (Band(*one) for one in zip(names, tags, found, strict=False))
    grown_times, grown = records.reserved()
    kept_grown = _extremes([grown], _starts_of_parts(grown_times, end, parts), len(grown))
    return LiveByTag(
        seconds=records.duration,
        times=moments,
        live=live,
        bands=tuple(sorted(bands, key=lambda band: -float(band.nbytes[:-1] @ np.diff(moments)))),
        reserved_times=_padded_times(grown_times[kept_grown], end),
        reserved=_padded(grown[kept_grown]),
        limit=records.limit,
    )


class _Masks:
    """Which changes are those of which band: of each of the largest tags, and of all others where there are any."""

    def __init__(self, tags: NDArray[np.uint32], change: NDArray[np.int64]) -> None:
        order = np.argsort(tags, kind="stable")
        numbers, starts = np.unique(tags[order], return_index=True)
        sums = np.cumsum(change[order])
        before = np.where(starts > 0, sums[starts - 1], 0) if len(starts) else sums
        peaks = np.maximum.reduceat(sums, starts) - before if len(starts) else before
        self._tags = tags
        largest = numbers[np.argsort(-peaks, kind="stable")].tolist()
        self.numbers: list[int] = largest if len(largest) <= MOST_TAGS + 1 else largest[:MOST_TAGS]
        self._others = len(largest) > len(self.numbers)

    def __len__(self) -> int:
        return len(self.numbers) + self._others

    def __getitem__(self, number: int) -> NDArray[np.bool_]:
        if number < len(self.numbers):
            mask: NDArray[np.bool_] = self._tags == self.numbers[number]
        else:
            mask = ~np.isin(self._tags, self.numbers)
        return mask


def _padded(values: NDArray[np.int64]) -> NDArray[np.int64]:
    """Begin with nothing, and end as the last moment left it."""
    return np.concatenate((np.zeros(1, np.int64), values, values[-1:] if len(values) else np.zeros(1, np.int64)))


def _padded_times(times: NDArray[np.int64], end: int) -> NDArray[np.float64]:
    return np.concatenate((np.zeros(1, np.int64), times, np.full(1, end))) / 1e9


def _starts_of_parts(times: NDArray[np.int64], end: int, parts: int) -> NDArray[np.int64]:
    """Return where in `times`, which are in order, each part of the time begins that has any of them."""
    part = np.minimum(times * (parts / max(end, 1)), parts - 1).astype(np.int64)
    return np.flatnonzero(np.diff(part, prepend=-1))


def _extremes(series: Iterable[NDArray[np.int64]], starts: NDArray[np.int64], count: int) -> NDArray[np.int64]:
    """Return the places to keep, in order: in each part the highest and lowest of each series, and the last of all.

    Args:
        series: Values, `count` each. They may be made one after the other, so that no two must be in memory.
        starts: Where each part begins.
        count: How many moments there are.
    """
    if not count:
        return np.empty(0, np.int64)
    ends = np.append(starts[1:], count)
    kept = [ends - 1]
    for values in series:
        both = (most.reduceat(values, starts) for most in (np.maximum, np.minimum))
        kept += (_first(values == np.repeat(value, ends - starts), starts) for value in both)
    return np.unique(np.concatenate(kept))


def _first(marked: NDArray[np.bool_], starts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the first marked place of each part."""
    places = np.flatnonzero(marked)
    _, first = np.unique(np.searchsorted(starts, places, side="right"), return_index=True)
    return places[first]


def marks(records: Records, parts: int = PARTS) -> Marks:
    """Return when what is recorded happened: waits, growth or others of one kind.

    Args:
        records: Of that kind.
        parts: The share of the time that may lie between two of one mark.
    """
    rows = records.rows
    ends = (rows["time_ns"] - records.began) / 1e9
    longest = rows["span_ns"] / 1e9
    starts = np.maximum(ends - longest, 0.0)
    order = np.argsort(starts, kind="stable")
    starts, ends, longest, nbytes = starts[order], ends[order], longest[order], rows["nbytes"].astype(np.int64)[order]
    if not len(rows):
        return Marks(starts, ends, nbytes, nbytes, nbytes, longest)
    until = np.maximum.accumulate(ends)
    first = np.flatnonzero(np.append(True, starts[1:] > until[:-1] + records.duration / parts))
    return Marks(
        starts=starts[first],
        ends=until[np.append(first[1:], len(rows)) - 1],
        counts=np.diff(first, append=len(rows)),
        nbytes=np.add.reduceat(nbytes, first),
        largest=np.maximum.reduceat(nbytes, first),
        longest=np.maximum.reduceat(longest, first),
    )
