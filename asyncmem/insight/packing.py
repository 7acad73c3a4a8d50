"""Where to put buffers whose lifetimes are known, so that the range they need is short.

To place n intervals best is hard (NP-hard), and rarely needed: a few greedy orders come within a percent or so of what
is live at most, which is the least that can be needed. Each takes the buffers one by one and puts each as low as it
fits beside those placed before that are live at some time with it. The largest first is best for most programs, the
longest-lived first, roughly or exactly, for others. Then those that stuck out come first in their order, and it is
tried again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from asyncmem.pool.placement import most_live

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    Column = NDArray[np.int64]

_REPAIRS: Final = 8
_EFFORT: Final = 1 << 29
"""Comparisons of two buffers that may be spent on repairs: some seconds."""
_SHORT: Final = 0.98
"""The share of buffers that live shortly."""


def packed(starts: Column, ends: Column, sizes: Column, *, tolerance: float = 0.0) -> Column:
    """Return an offset for each buffer.

    Args:
        starts: When each is allocated,
        ends: and when it is freed, which is later.
        sizes: Bytes of each, in whole units of alignment.
        tolerance: Enough has been tried once the peak is above what is live at most by no more than this share of it.
    """
    enough = int(most_live(starts, ends, sizes) * (1 + tolerance))
    best, least = np.zeros(len(sizes), np.int64), -1
    for offsets in _attempts(starts, ends, sizes, enough):
        peak = int((offsets + sizes).max(initial=0))
        if least < 0 or peak < least:
            best, least = offsets, peak
        if least <= enough:
            break
    return best


def _attempts(starts: Column, ends: Column, sizes: Column, enough: int) -> Iterator[Column]:
    lives = ends - starts
    orders = [
        np.lexsort((starts, -lives, -sizes)),
        np.lexsort((starts, -sizes, -np.frexp(lives)[1])),
        np.lexsort((starts, -sizes, -lives)),
        np.lexsort((starts, -(sizes.astype(np.float64) * lives))),
    ]
    found = []
    for order in orders:
        found.append(_in_order(starts, ends, sizes, order))
        yield found[-1]
    repairs = min(_REPAIRS, _EFFORT // max(len(sizes), 1) ** 2)
    for order, offsets in zip(orders, found, strict=True):
        tried, latest = order, offsets
        for _ in range(repairs):
            out = (latest + sizes > enough)[tried]
            tried = np.concatenate((tried[out], tried[~out]))
            latest = _in_order(starts, ends, sizes, tried)
            yield latest


def _in_order(starts: Column, ends: Column, sizes: Column, order: NDArray[np.intp]) -> Column:
    by_start = np.argsort(starts, kind="stable")
    ranks = np.empty_like(by_start)
    ranks[by_start] = np.arange(len(by_start))
    placed = _Placed(starts[by_start], ends[by_start], sizes[by_start])
    for number in ranks[order].tolist():
        placed.put(number)
    return placed.offsets[ranks]


class _Placed:
    """What has its place already; buffers are numbered by their starts.

    Most live shortly, so those beside one of them began shortly before it: only these are looked at, and the few that
    live long.
    """

    def __init__(self, starts: Column, ends: Column, sizes: Column) -> None:
        self.offsets = np.zeros(len(sizes), np.int64)
        self._tops = np.zeros(len(sizes), np.int64)
        self._until = np.full(len(sizes), np.iinfo(np.int64).min)  # the end of what is placed
        self._starts, self._ends, self._sizes = starts, ends, sizes
        lives = ends - starts
        short = np.quantile(lives, _SHORT, method="lower") if len(lives) else 0
        self._lasting = (lives > short).tolist()
        self._long = np.empty(0, np.intp)  # those that live long and are placed, by offset
        self._from = starts.searchsorted(starts - short).tolist()
        self._to = starts.searchsorted(ends).tolist()

    def put(self, number: int) -> None:
        """Place one more in the lowest gap that holds it."""
        start, size = self._starts[number], self._sizes[number]
        first, last = self._from[number], self._to[number]
        near = np.flatnonzero(self._until[first:last] > start) + first
        long = self._long[(self._long < first) & (self._until[self._long] > start)]
        beside = np.concatenate((long, near))
        offset = _lowest_gap(self.offsets[beside], self._tops[beside], size)
        if self._lasting[number]:
            self._long = np.insert(self._long, self.offsets[self._long].searchsorted(offset), number)
        self.offsets[number], self._tops[number] = offset, offset + size
        self._until[number] = self._ends[number]


def _lowest_gap(offsets: Column, tops: Column, size: np.int64) -> np.int64:
    if not len(offsets):
        return np.int64(0)
    upwards = offsets.argsort(kind="stable")  # quick where much is in order already
    reached = np.maximum.accumulate(tops[upwards])
    below = np.concatenate(([0], reached[:-1]))
    wide = offsets[upwards] - below >= size
    first = int(wide.argmax())
    found: np.int64 = below[first] if wide[first] else reached[-1]
    return found
