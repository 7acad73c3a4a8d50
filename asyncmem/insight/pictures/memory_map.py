"""Where buffers lay in the segments at a time, and where the holes were."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple, final

from asyncmem.insight.reports.segments import segments

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from asyncmem.insight.records import Records
    from asyncmem.insight.reports.segments import Segment

MOST_ROWS: Final = 48
"""So many segments are shown: the largest."""

_CELLS: Final = 2000  # of the longest row: below what a screen tells apart
_MOST_BLOCKS: Final = 20_000


class Block(NamedTuple):
    """Buffers of one tag that lie side by side, too small to be shown one by one; or one that is not."""

    row: int
    """The number of the segment that it lies in."""
    left: int
    """Where it begins in that, in bytes,"""
    right: int
    """and where it ends."""
    tag: str | None
    """What it was allocated under."""
    buffers: int
    """How many buffers it is,"""
    nbytes: int
    """and their bytes; what is left of its length lies between them."""


@final
@dataclass(frozen=True, kw_only=True)
class MemoryMap:
    """Segments and what lay in them at a time. Memory by pages has no segments."""

    time: float
    """When, in seconds from the beginning."""
    rows: tuple[Segment, ...]
    """The segments that are shown, by pools and addresses; without their pieces, which are in `blocks`."""
    blocks: tuple[Block, ...]
    """What lay in them. Holes between blocks are all there but those that a screen could not show."""
    left_out: int
    """How many smaller segments are not shown,"""
    left_out_bytes: int
    """and their bytes."""


def memory_map(records: Records, time: float | None = None) -> MemoryMap:
    """Answer where buffers lay.

    Args:
        records: What happened.
        time: When, in seconds from the beginning; when the most was live without it.
    """
    found = segments(records, time)
    shown = _largest(found.segments)
    cell = max((one.nbytes for one in shown), default=0) // _CELLS
    blocks = tuple(_blocks(shown, cell))
    while len(blocks) > _MOST_BLOCKS:
        cell *= 2
        blocks = tuple(_blocks(shown, cell))
    return MemoryMap(
        time=found.time,
        rows=tuple(one._replace(pieces=()) for one in shown),
        blocks=blocks,
        left_out=len(found.segments) - len(shown),
        left_out_bytes=sum(one.nbytes for one in found.segments) - sum(one.nbytes for one in shown),
    )


def _largest(those: tuple[Segment, ...]) -> list[Segment]:
    by_size = sorted(range(len(those)), key=lambda at: -those[at].nbytes)
    return [those[at] for at in sorted(by_size[:MOST_ROWS])]


def _blocks(shown: Iterable[Segment], cell: int) -> Iterator[Block]:
    for row, segment in enumerate(shown):
        small: dict[tuple[int, str | None], Block] = {}
        for piece in segment.pieces:
            block = Block(row, piece.offset, piece.offset + piece.nbytes, piece.tag, 1, piece.nbytes)
            if piece.nbytes >= cell:
                yield block
            else:
                place = piece.offset // cell, piece.tag
                small[place] = _joined(small[place], block) if place in small else block
        yield from small.values()


def _joined(one: Block, other: Block) -> Block:
    return one._replace(right=other.right, buffers=one.buffers + 1, nbytes=one.nbytes + other.nbytes)
