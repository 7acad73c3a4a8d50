"""Fewer moments for a picture than there were, without losing an extreme."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

PARTS: Final = 1000
"""In how many parts a picture cuts the time: about as many as a screen has columns for it."""


def starts_of_parts(times: NDArray[np.int64], end: int, parts: int) -> NDArray[np.int64]:
    """Answer where in `times`, which are in order, each part of the time begins that has any of them."""
    part = np.minimum(times * parts // max(end, 1), parts - 1)
    return np.flatnonzero(np.diff(part, prepend=-1))


def extremes(series: Iterable[NDArray[np.int64]], starts: NDArray[np.int64], count: int) -> NDArray[np.int64]:
    """Answer the places to keep, in order: in each part the highest and lowest of each series, and the last of all.

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
    """Answer the first marked place of each part."""
    places = np.flatnonzero(marked)
    _, first = np.unique(np.searchsorted(starts, places, side="right"), return_index=True)
    return places[first]
