"""Bytes or seconds by the lines that caused them: each line lies below its caller, as wide as its share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple, final

import numpy as np

from asyncmem.core import Kind
from asyncmem.figures import format_count

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from asyncmem.insight.names import Site
    from asyncmem.insight.records import Records

SMALLEST: Final = 1 / 1000
"""The share of the whole from which a line is shown by itself; smaller ones of one caller are shown together."""


class Cell(NamedTuple):
    """A line of a program, or several small ones."""

    site: Site | None
    """The line; None for several, or where none is known."""
    name: str
    """What it is called: the line, or how many they are."""
    depth: int
    """How many callers are above it."""
    left: float
    """Where it begins,"""
    right: float
    """and where it ends: so many bytes or seconds are its and those of what it called."""
    requests: int
    """How many buffers or waits these are."""


@final
@dataclass(frozen=True, kw_only=True)
class Icicle:
    """Lines below their callers."""

    total: float
    """Bytes or seconds of all."""
    requests: int
    """How many buffers or waits these are."""
    cells: tuple[Cell, ...]
    """The lines, callers before what they called, the widest first."""


def at_the_peak(records: Records) -> Icicle:
    """Answer whose the bytes were when the most was live."""
    live = records.live_at(records.peak().time).rows
    return _icicle(records, live["site"], live["nbytes"])


def leaked(records: Records) -> Icicle:
    """Answer whose the bytes are that were allocated while it was recorded, and never freed."""
    live = records.live_at().of(Kind.ALLOCATED).rows
    return _icicle(records, live["site"], live["nbytes"])


def waited(records: Records) -> Icicle:
    """Answer whose requests waited for memory, in seconds."""
    rows = records.of(Kind.WAITED).rows
    return _icicle(records, rows["site"], rows["span_ns"] / 1e9)


@dataclass
class _Line:
    """What a line and what it called come to."""

    site: Site | None = None
    weight: float = 0.0
    requests: int = 0
    calls: dict[Site | None, _Line] = field(default_factory=dict)


def _icicle(records: Records, sites: NDArray[Any], weights: NDArray[Any]) -> Icicle:
    numbers, places = np.unique(sites, return_inverse=True)
    sums = np.bincount(places, weights, len(numbers)).tolist()
    counts = np.bincount(places, minlength=len(numbers)).tolist()
    root = _Line()
    for number, weight, count in zip(numbers.tolist(), sums, counts, strict=True):
        way = [root]
        for site in records.names.frames(number)[::-1] or (None,):
            way.append(way[-1].calls.setdefault(site, _Line(site)))
        for line in way:
            line.weight += weight
            line.requests += count
    return Icicle(total=root.weight, requests=root.requests, cells=tuple(_cells(root)))


def _cells(root: _Line) -> Iterator[Cell]:
    waiting = [(root, 0, 0.0)]
    while waiting:
        line, depth, left = waiting.pop()
        small = _Line()
        lines = 0
        for call in sorted(line.calls.values(), key=lambda one: (-one.weight, str(one.site))):
            if call.weight < root.weight * SMALLEST:
                small.weight += call.weight
                small.requests += call.requests
                lines += 1
                continue
            yield Cell(call.site, str(call.site or "?"), depth, left, left + call.weight, call.requests)
            waiting.append((call, depth + 1, left))
            left += call.weight
        if lines and small.weight:
            name = format_count(lines, "smaller line")
            yield Cell(None, name, depth, left, left + small.weight, small.requests)
