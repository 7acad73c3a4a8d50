"""`tree`: whose memory it is, from the outermost line of each call inwards."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, final

import numpy as np

if TYPE_CHECKING:
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
    """Answer whose memory is live, as a tree of lines.

    Args:
        records: What happened. They have as many lines of each call as the recording's `frames` says.
        time: When, in seconds from the beginning; when the most was live without it.
    """
    when = records.peak().time if time is None else time
    live = records.live_at(when)
    root = Node(name="")
    lines = _Lines(root)
    numbers, places = np.unique(live.rows["site"], return_inverse=True)
    sums = np.bincount(places, live.rows["nbytes"], len(numbers)).astype(np.int64).tolist()
    counts = np.bincount(places, minlength=len(numbers)).tolist()
    for number, nbytes, count in zip(numbers.tolist(), sums, counts, strict=True):
        for node in lines.way(records.names.frames(number)):
            node.nbytes += nbytes
            node.buffers += count
    _sort(root)
    return Tree(time=when, nbytes=root.nbytes, buffers=root.buffers, calls=tuple(root.calls))


class _Lines:
    """The nodes of a tree, found by the way that leads to them."""

    def __init__(self, root: Node) -> None:
        self._root = root
        self._known: dict[tuple[str, ...], Node] = {}

    def way(self, frames: tuple[Site, ...]) -> list[Node]:
        """Answer the nodes of a call from the root to the innermost line."""
        nodes = [self._root]
        way: tuple[str, ...] = ()
        for name in [str(site) for site in reversed(frames)] or ["?"]:
            way = (*way, name)
            if way not in self._known:
                self._known[way] = Node(name=name)
                nodes[-1].calls.append(self._known[way])
            nodes.append(self._known[way])
        return nodes


def _sort(node: Node) -> None:
    node.calls.sort(key=lambda one: (-one.nbytes, one.name))
    for one in node.calls:
        _sort(one)
