"""Lists of buffers: pairs of a size in bytes and how many of it there are."""

from collections.abc import Iterable
from typing import TypeAlias

Buffers: TypeAlias = tuple[tuple[int, int], ...]
"""Pairs of a size in bytes and a count, as a pool's `warmup` takes them."""


def total_of(buffers: Iterable[tuple[int, int]]) -> int:
    """Answer the bytes of all of them."""
    return sum(size * count for size, count in buffers)


def larger(*candidates: Buffers) -> Buffers:
    """Answer the list with the most bytes: of what is never alive at once, that is what counts."""
    return max(candidates, key=total_of)


def times(factor: int, buffers: Buffers) -> Buffers:
    """Answer so many of each."""
    return tuple((size, count * factor) for size, count in buffers)


def merged(buffers: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Join those of one size, largest first; what is empty is left out."""
    counts: dict[int, int] = {}
    for size, count in buffers:
        counts[size] = counts.get(size, 0) + count
    return [(size, counts[size]) for size in sorted(counts, reverse=True) if size and counts[size]]
