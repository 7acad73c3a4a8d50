"""What pools had from the device when recording began, put right by what is told of it later.

It is listed a moment after records begin. What comes in that moment is listed and comes once more; what is on its way
back to the device then is listed no more, and still goes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from asyncmem.core import Kind

if TYPE_CHECKING:
    from numpy.typing import NDArray

NOBODY: Final = (1 << 64) - 1
"""The number of an allocation in rows that are about none."""


def righted(rows: NDArray[np.void]) -> NDArray[np.void]:
    """Answer rows in which all that goes was there before, and nothing comes twice: growth and trims add up."""
    at = np.flatnonzero((rows["kind"] == Kind.GREW) | (rows["kind"] == Kind.TRIMMED))
    if not len(at):
        return rows
    places = rows["address"][at]
    # Where it is not always known which memory it is, only the sum over the pool can be told.
    places[np.isin(rows["pool"][at], rows["pool"][at[places == 0]])] = 0
    order = np.lexsort((places, rows["pool"][at]))
    at, places = at[order], places[order]
    moves = rows[at]
    other = (np.diff(moves["pool"]) != 0) | (np.diff(places) != 0)
    came = moves["kind"] == Kind.GREW
    twice = np.flatnonzero(~other & came[:-1] & came[1:] & (moves["span_ns"][:-1] == 0) & (places[1:] != 0))
    change = np.where(came, 1, -1) * moves["nbytes"].astype(np.int64)
    change[twice] = 0
    firsts = np.flatnonzero(np.append(True, other))
    sums = np.cumsum(change)
    lowest = np.minimum.reduceat(sums, firsts) - (sums - change)[firsts]
    lacking = lowest < 0
    if not lacking.any() and not len(twice):
        return rows  # and no copy of what may be all of the memory there is
    unlisted = np.zeros(np.count_nonzero(lacking), rows.dtype)
    unlisted["kind"], unlisted["number"], unlisted["time_ns"] = Kind.GREW, NOBODY, rows["time_ns"][0]
    unlisted["pool"], unlisted["address"] = moves["pool"][firsts[lacking]], places[firsts[lacking]]
    unlisted["nbytes"] = -lowest[lacking]
    return np.concatenate((unlisted, np.delete(rows, at[twice])))
