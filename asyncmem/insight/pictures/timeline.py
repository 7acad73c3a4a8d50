"""What was live over time, in bands by tag, below what was reserved."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple, final

import numpy as np

from asyncmem.core import Kind
from asyncmem.insight.pictures.thinning import PARTS, extremes, starts_of_parts
from asyncmem.insight.reserved import reserved

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from asyncmem.insight.records import Records

MOST_TAGS: Final = 8
"""So many tags have a band of their own, as the eye tells so many colours apart."""

NO_TAG: Final = "no tag"
OTHERS: Final = "all others"


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


def live_by_tag(records: Records, parts: int = PARTS) -> LiveByTag:
    """Answer what was live over time, by tag.

    Args:
        records: What happened.
        parts: In how many parts the time is cut; see `LiveByTag` for what is kept of each.
    """
    rows = records.rows[records.rows["kind"] <= Kind.HELD]
    change = rows["nbytes"].astype(np.int64)
    change[rows["kind"] == Kind.FREED] *= -1
    times, end = rows["time_ns"] - records.began, round(records.duration * 1e9)
    masks = _Masks(rows["tag"], change)

    def series() -> Iterator[NDArray[np.int64]]:
        yield np.cumsum(change)
        for number in range(len(masks)):
            yield np.cumsum(change * masks[number])

    kept = extremes(series(), starts_of_parts(times, end, parts), len(rows))
    live, *found = [_padded(values[kept]) for values in series()]
    names = [*((records.names.tag(number) or NO_TAG) for number in masks.numbers), OTHERS]
    moments = _padded_times(times[kept], end)
    tags = [*(records.names.tag(number) for number in masks.numbers), None]
    bands = (Band(*one) for one in zip(names, tags, found, strict=False))
    grown_times, grown = reserved(records)
    kept_grown = extremes([grown], starts_of_parts(grown_times, end, parts), len(grown))
    return LiveByTag(
        seconds=records.duration,
        times=moments,
        live=live,
        bands=tuple(sorted(bands, key=lambda band: -float(band.nbytes[:-1] @ np.diff(moments)))),
        reserved_times=_padded_times(grown_times[kept_grown], end),
        reserved=_padded(grown[kept_grown]),
        limit=sum(pool.limit for pool in records.names.pools),
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
