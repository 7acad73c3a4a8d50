"""`timeline`: how much was live and reserved, from the beginning to the end; what a picture shows of it.

A picture has fewer moments than there were, and loses no extreme: see `LiveByTag`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from asyncmem.core import Kind
from asyncmem.errors import InvalidRequest
from asyncmem.figures import format_duration, format_size
from asyncmem.insight.groups import Grouped
from asyncmem.insight.records import Records
from asyncmem.insight.reports.display import drawing
from asyncmem.insight.rows import change_of

MOST_MOMENTS: Final = 100_000

PARTS: Final = 1000
"""In how many parts a picture cuts the time: about as many as a screen has columns for it."""

MOST_TAGS: Final = 8
"""So many tags have a band of their own, as the eye tells so many colours apart."""

NO_TAG: Final = "no tag"
OTHERS: Final = "all others"

MARGIN: Final = 12
"""Columns left of what is drawn."""
_HEIGHT: Final = 12
_EIGHTHS: Final = " ▁▂▃▄▅▆▇█"


class Moment(NamedTuple):
    """A part of the time.

    Attributes:
        time: When it begins, in seconds from the beginning.
        live: The most bytes that were live in it.
        reserved: The most bytes that were reserved in it.
        waits: How many requests left the queue in it.
        out_of_memory: How many requests were refused in it.
    """

    time: float
    live: int
    reserved: int
    waits: int
    out_of_memory: int


@final
@dataclass(frozen=True, kw_only=True)
class Timeline:
    """What was live and reserved over time.

    Attributes:
        seconds: How long was recorded.
        peak: The most bytes that were live.
        limit: The most bytes that the pools might reserve together.
        moments: The time in parts of the same length.
    """

    seconds: float
    peak: int
    limit: int
    moments: tuple[Moment, ...]

    def _repr_html_(self) -> str:
        return drawing(drawn(self))


class Band(NamedTuple):
    """What was live under a tag.

    Attributes:
        name: The tag; `NO_TAG` for what has none, `OTHERS` for the tags without a band.
        tag: The tag, None for those two.
        nbytes: Bytes at each of the picture's times.
    """

    name: str
    tag: str | None
    nbytes: NDArray[np.int64]


@final
@dataclass(frozen=True, kw_only=True)
class LiveByTag:
    """What was live and reserved. What a time has, holds until the next one.

    Of many moments those are kept at which something was highest or lowest in its part of the time: the whole, or a
    band. So the peak is there, and every other extreme that a screen could show.

    Attributes:
        seconds: How long was recorded.
        times: Moments, in seconds from the beginning.
        live: Bytes that were live at each.
        bands: The same by tag, what was most over all the time first. They add up to `live`.
        reserved_times: When the pools got or gave back memory.
        reserved: Bytes that they had then.
        limit: The most bytes that they might have together.
    """

    seconds: float
    times: NDArray[np.float64]
    live: NDArray[np.int64]
    bands: tuple[Band, ...]
    reserved_times: NDArray[np.float64]
    reserved: NDArray[np.int64]
    limit: int


class Marks(NamedTuple):
    """Times during which something happened; those that a screen would not tell apart are one.

    Attributes:
        starts: When each begins, in seconds from the beginning.
        ends: When it ends.
        counts: How often it happened in between.
        nbytes: For how many bytes together.
        largest: For how many bytes at most.
        longest: For how many seconds at most.
    """

    starts: NDArray[np.float64]
    ends: NDArray[np.float64]
    counts: NDArray[np.int64]
    nbytes: NDArray[np.int64]
    largest: NDArray[np.int64]
    longest: NDArray[np.float64]


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
    columns = (_most(*records.live(), edges), _most(*records.reserved(), edges))
    counts = (
        np.histogram(records.of(kind).rows["time_ns"] - records.began, edges)[0].tolist()
        for kind in (Kind.WAITED, Kind.OUT_OF_MEMORY)
    )
    return Timeline(
        seconds=records.duration,
        peak=records.peak().nbytes,
        limit=records.limit,
        moments=tuple(map(Moment, (edges[:-1] / 1e9).tolist(), *columns, *counts)),
    )


def drawn(found: Timeline) -> Iterator[str]:
    """Draw what was live over time in lines of text, with what was reserved above it."""
    top = max(1, *(max(one.live, one.reserved) for one in found.moments))
    for row in reversed(range(_HEIGHT)):
        label = format_size(round(top * (row + 1) / _HEIGHT)) if row % 3 == 2 else ""
        yield f"{label:>{MARGIN - 2}} ┤{''.join(_cell(one, row, top) for one in found.moments)}".rstrip()
    yield f"{'':>{MARGIN - 2}} └{'─' * len(found.moments)}"
    marks = "".join("!" if one.out_of_memory else "w" if one.waits else " " for one in found.moments)
    if marks.strip():
        yield " " * MARGIN + marks.rstrip()
    end = format_duration(found.seconds)
    yield " " * MARGIN + "0 s" + end.rjust(len(found.moments) - 3)


def _cell(moment: Moment, row: int, top: int) -> str:
    filled = min(max(-(-moment.live * _HEIGHT * 8 // top) - row * 8, 0), 8)
    if filled == 0 and moment.reserved and (moment.reserved * _HEIGHT - 1) // top == row:
        return "─"
    return _EIGHTHS[filled]


def _most(times: NDArray[np.int64], values: NDArray[np.int64], edges: NDArray[np.int64]) -> list[int]:
    """Return the largest value that held in each part, that from before it included."""
    borders = np.searchsorted(times, edges).tolist()
    held = np.append(np.int64(0), values)  # held[i] is what holds before the change i
    return [int(held[first : last + 1].max()) for first, last in pairwise(borders)]


def live_by_tag(records: Records, parts: int = PARTS) -> LiveByTag:
    """Return what was live over time, by tag.

    Args:
        records: What happened.
        parts: In how many parts the time is cut; see `LiveByTag` for what is kept of each.
    """
    rows = records.rows[records.rows["kind"] <= Kind.HELD]
    change = change_of(rows, Kind.FREED)
    by_tag = Grouped(rows["tag"], records.names.tag)
    tags = np.argsort(-by_tag.peaks(change), kind="stable")  # the largest first
    tags = tags if len(tags) <= MOST_TAGS + 1 else tags[:MOST_TAGS]
    band_of = np.full(len(by_tag.keys), len(tags))
    band_of[tags] = np.arange(len(tags))
    band = band_of[by_tag.places]  # of each change; what is behind the last tag is all others
    names = [by_tag.keys[tag] for tag in tags.tolist()]

    def series() -> Iterator[NDArray[np.int64]]:
        yield np.cumsum(change)
        for number in range(len(tags) + (len(tags) < len(by_tag.keys))):
            yield np.cumsum(change * (band == number))

    times, end = rows["time_ns"] - records.began, round(records.duration * 1e9)
    kept = _extremes(series(), _starts_of_parts(times, end, parts), len(rows))
    live, *found = [_padded(values[kept]) for values in series()]
    moments = _padded_times(times[kept], end)
    bands = map(Band, [*(name or NO_TAG for name in names), OTHERS], [*names, None], found)
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
        for most in (np.maximum, np.minimum):
            places = np.flatnonzero(values == np.repeat(most.reduceat(values, starts), ends - starts))
            kept.append(places[np.unique(np.searchsorted(starts, places, side="right"), return_index=True)[1]])
    return np.unique(np.concatenate(kept))


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
