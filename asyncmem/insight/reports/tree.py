"""`tree`: what was live by the lines of each call, from the outermost line inwards."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, final

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from asyncmem.insight.names import Site
    from asyncmem.insight.records import Records


@final
@dataclass(kw_only=True)
class Node:
    """A line, and what it has called."""

    name: str
    """The line; "?" where no line is known."""
    nbytes: int = 0
    """Bytes that it and what it has called asked for and that are live."""
    buffers: int = 0
    """In how many buffers."""
    calls: list[Node] = field(default_factory=list)
    """Lines that were called from here, the largest first."""


@final
@dataclass(frozen=True, kw_only=True)
class Tree:
    """What was live at a time, by the lines that had called for it."""

    time: float
    """When, in seconds from the beginning."""
    nbytes: int
    """How much was live,"""
    buffers: int
    """in how many buffers."""
    calls: tuple[Node, ...]
    """The outermost lines that are known, the largest first."""


def tree(records: Records, time: float | None = None) -> Tree:
    """Return what is live, as a tree of lines.

    Args:
        records: What happened. They have as many lines of each call as the recording's `frames` says.
        time: When, in seconds from the beginning; when the most was live without it.
    """
    when = records.peak().time if time is None else time
    live = records.live_at(when)
    root = _node(lines_of(live, live.rows["nbytes"]))
    return Tree(time=when, nbytes=root.nbytes, buffers=root.buffers, calls=tuple(root.calls))


def _node(line: Line) -> Node:
    calls = [_node(one) for one in line.largest_first()]
    return Node(name=str(line.site or "?"), nbytes=round(line.weight), buffers=line.requests, calls=calls)


@dataclass
class Line:
    """A line, with all that it and what it called come to.

    Attributes:
        site: The line; None for the root, and where none is known.
        weight: Bytes or seconds.
        requests: Of how many buffers or waits.
        tags: The weight of each tag, by its number.
        calls: The lines that it called.
    """

    site: Site | None = None
    weight: float = 0.0
    requests: int = 0
    tags: Counter[int] = field(default_factory=Counter)
    calls: dict[Site | None, Line] = field(default_factory=dict)

    def largest_first(self) -> list[Line]:
        """Return the lines that it called."""
        return sorted(self.calls.values(), key=lambda one: (-one.weight, str(one.site)))


def lines_of(records: Records, weights: NDArray[np.generic]) -> Line:
    """Return the root of a tree of lines, in which each record counts for its call with a weight."""
    rows = records.rows
    keys, places = np.unique(rows["site"].astype(np.uint64) << np.uint64(16) | rows["tag"], return_inverse=True)
    sums = np.bincount(places, weights, len(keys)).tolist()
    counts = np.bincount(places, minlength=len(keys)).tolist()
    root = Line()
    for key, weight, count in zip(keys.tolist(), sums, counts, strict=True):
        way = [root]
        for site in records.names.frames(key >> 16)[::-1] or (None,):
            way.append(way[-1].calls.setdefault(site, Line(site)))
        for line in way:
            line.weight += weight
            line.requests += count
            line.tags[key & 0xFFFF] += weight
    return root
