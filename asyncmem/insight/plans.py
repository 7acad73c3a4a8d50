"""Plans of buffers whose lifetimes are known: where to put each, so that the range is short; and files of plans.

To place n intervals best is hard (NP-hard), and rarely needed: a few greedy orders come within a percent or so of what
is live at most, which is the least that can be needed. Each takes the buffers one by one and puts each as low as it
fits beside those placed before that are live at some time with it. The largest first is best for most programs, the
longest-lived first, roughly or exactly, for others. Then those that stuck out come first in their order, and it is
tried again.
"""

from __future__ import annotations

from collections.abc import Iterator
from os import PathLike
from pathlib import Path
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from asyncmem.errors import Described, InvalidRequest
from asyncmem.files import read_json
from asyncmem.pool.placement import PlannedPlace, ReusePlan, most_live
from asyncmem.text import to_json

Column: TypeAlias = NDArray[np.int64]

_REPAIRS: Final = 8
_EFFORT: Final = 1 << 29
"""Comparisons of two buffers that may be spent on repairs: some seconds."""
_SHORT: Final = 0.98
"""The share of buffers that live shortly."""

_VERSION: Final = 1  # of files
_NUMBERS: Final = ("nbytes", "start", "end", "offset")
_MOST: Final = 1 << 48
"""More than any device has bytes, or any recording has records."""


def packed(starts: Column, ends: Column, sizes: Column, *, tolerance: float = 0.0) -> Column:
    """Return an offset for each buffer.

    Args:
        starts: When each is allocated; buffers come in this order.
        ends: When each is freed, which is later.
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
    repairs = min(_REPAIRS, _EFFORT // max(len(sizes), 1) ** 2)
    for _ in range(1 + repairs):
        for at, order in enumerate(orders):
            offsets = _placed(starts, ends, sizes, order)
            yield offsets
            out = (offsets + sizes > enough)[order]
            orders[at] = np.concatenate((order[out], order[~out]))


def _placed(starts: Column, ends: Column, sizes: Column, order: NDArray[np.intp]) -> Column:
    """Place buffers one by one, each in the lowest gap beside those placed before that are live with it.

    Most live shortly, so those beside one of them began shortly before it: only these are looked at, and the few that
    live long.
    """
    offsets, tops = np.zeros((2, len(sizes)), np.int64)
    until = np.full(len(sizes), np.iinfo(np.int64).min)  # the end of what is placed
    long = np.empty(0, np.intp)  # those that live long and are placed, by offset
    lives = ends - starts
    short = np.quantile(lives, _SHORT, method="lower") if len(lives) else 0
    firsts, lasts = starts.searchsorted(starts - short).tolist(), starts.searchsorted(ends).tolist()
    for number in order.tolist():
        start, first = starts[number], firsts[number]
        near = np.flatnonzero(until[first : lasts[number]] > start) + first
        beside = np.concatenate((long[(long < first) & (until[long] > start)], near))
        offset = _lowest_gap(offsets[beside], tops[beside], sizes[number])
        if lives[number] > short:
            long = np.insert(long, offsets[long].searchsorted(offset), number)
        offsets[number], tops[number], until[number] = offset, offset + sizes[number], ends[number]
    return offsets


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


# -- files -------------------------------------------------------------------------------------------------------------


def write_plan(plan: ReusePlan, path: str | PathLike[str]) -> None:
    """Write a plan to a file, for `read_plan`; what was there is replaced.

    Raises:
        OSError: The file cannot be written.
    """
    Path(path).write_text(spelled(plan), encoding="utf-8")


def spelled(plan: ReusePlan) -> str:
    """Return a plan as it stands in a file: a place a line."""
    places = ",\n".join(to_json(place._asdict()) for place in plan.places)
    return f'{{"version": {_VERSION}, "align": {plan.align}, "places": [\n{places}\n]}}\n'


def read_plan(path: str | PathLike[str]) -> ReusePlan:
    """Read a plan that `write_plan` or ``asyncmem plan`` wrote; it is checked as every plan is.

    Raises:
        InvalidRequest: It is no such file, or of a version that this asyncmem does not know, or its places are in each
            other's way.
        OSError: It cannot be read.
    """
    expected = "a plan, as asyncmem plan writes it"
    try:
        found = read_json(path)
    except ValueError as error:
        raise InvalidRequest("plan", Described(f"{path}: {error}"), expected) from error
    match found:
        case {"version": int(version)} if version > _VERSION:
            raise InvalidRequest("plan", Described(f"{path} of version {version}"), f"version {_VERSION}")
        case {"version": int(), "align": int(align), "places": list(places)} if align < _MOST and all(
            map(_is_place, places)
        ):
            return ReusePlan(
                tuple(PlannedPlace(one["key"], *(one[name] for name in _NUMBERS)) for one in places), align
            )
    raise InvalidRequest("plan", Described(f"{path} with something else"), expected)


def _is_place(one: object) -> bool:
    return (
        isinstance(one, dict)
        and isinstance(one.get("key", 0), str | None)
        and all(type(one.get(name)) is int and 0 <= one[name] < _MOST for name in _NUMBERS)
    )
