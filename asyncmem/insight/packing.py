"""Where to put buffers whose lifetimes are known, so that the range they need is short.

To place n intervals best is hard (NP-hard), and rarely needed: a few greedy orders come within a percent or so of what
is live at most, less than which nobody needs. Each takes the buffers one by one and puts each as low as it fits beside
those placed before that are live at some time with it. The largest first is best for most programs, the longest-lived
first, roughly or exactly, for others. Then those that stuck out come first in their order, and it is tried again.
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
"""Comparisons of two buffers that may be spent on repairs: about two seconds."""


def packed(starts: Column, ends: Column, sizes: Column, *, tolerance: float = 0.0) -> Column:
    """Answer an offset for each buffer.

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
    placed = _Placed(len(sizes))
    offsets = np.zeros(len(sizes), np.int64)
    for index in order.tolist():
        offsets[index] = placed.put(int(starts[index]), int(ends[index]), int(sizes[index]))
    return offsets


class _Placed:
    """What has its place already, by offset."""

    def __init__(self, most: int) -> None:
        self._rows = np.empty((4, most), np.int64)  # start, end, offset, and the first byte behind
        self._count = 0

    def put(self, start: int, end: int, size: int) -> int:
        """Place one more, and answer where: the lowest gap that holds it."""
        starts, ends, offsets, tops = self._rows[:, : self._count]
        beside = np.flatnonzero((starts < end) & (ends > start))
        offset = _lowest_gap(offsets[beside], tops[beside], size)
        at = int(offsets.searchsorted(offset))
        self._rows[:, at + 1 : self._count + 1] = self._rows[:, at : self._count].copy()
        self._rows[:, at] = start, end, offset, offset + size
        self._count += 1
        return offset


def _lowest_gap(offsets: Column, tops: Column, size: int) -> int:
    if not len(offsets):
        return 0
    reached = np.maximum.accumulate(tops)
    below = np.concatenate(([0], reached[:-1]))
    wide = offsets - below >= size
    first = int(wide.argmax())
    return int(below[first] if wide[first] else reached[-1])
