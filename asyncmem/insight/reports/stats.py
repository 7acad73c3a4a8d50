"""`stats`: how large, how long, how served: allocations by the thousand."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, final

import numpy as np

from asyncmem.core import Kind, Level
from asyncmem.insight.analysis import AllocationPatterns, analyze_allocation_patterns

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from asyncmem.insight.groups import Group
    from asyncmem.insight.records import Records


class SizeClass(NamedTuple):
    """Allocations of about one size."""

    below: int
    """They have fewer bytes than this, and at least half of it."""
    allocations: int
    """How many they are."""
    nbytes: int
    """Their bytes together."""


class LifeClass(NamedTuple):
    """Buffers that were held for about as long."""

    below: float
    """They were held for fewer seconds than this, and at least for a tenth of it."""
    buffers: int
    """How many they are."""


@final
@dataclass(frozen=True, kw_only=True)
class Stats:
    """What allocations are like."""

    allocations: int
    """How many there were."""
    allocated: int
    """Their bytes together."""
    smallest: int
    """Bytes of the smallest,"""
    median: int
    """of one that half of them do not exceed,"""
    largest: int
    """and of the largest."""
    sizes: tuple[SizeClass, ...]
    """How they are spread over sizes, smallest first."""
    lifetimes: tuple[LifeClass, ...]
    """How those that were freed are spread over the time that they were held, shortest first."""
    served: dict[str, int]
    """How many each level served, by the names of `Level`."""
    lines: tuple[Group, ...]
    """Which lines allocated, the most bytes first."""
    patterns: AllocationPatterns
    """What is asked for again and again, and what would help."""


def stats(records: Records) -> Stats:
    """Answer what the allocations are like."""
    taken = records.of(Kind.ALLOCATED)
    sizes = np.sort(taken.rows["nbytes"].astype(np.int64))
    levels = np.bincount(taken.rows["level"], minlength=len(Level)).tolist()
    return Stats(
        allocations=len(sizes),
        allocated=int(sizes.sum()),
        smallest=int(sizes[0]) if len(sizes) else 0,
        median=int(sizes[(len(sizes) - 1) // 2]) if len(sizes) else 0,
        largest=int(sizes[-1]) if len(sizes) else 0,
        sizes=_sizes(sizes),
        lifetimes=_lifetimes(records.of(Kind.FREED).rows["span_ns"]),
        served={level.name.lower(): levels[level] for level in Level},
        lines=taken.by("site"),
        patterns=analyze_allocation_patterns(records),
    )


def _sizes(sizes: NDArray[np.int64]) -> tuple[SizeClass, ...]:
    powers = np.frexp(sizes.astype(np.float64))[1]  # 2**(power - 1) <= size < 2**power
    counts, sums = np.bincount(powers), np.bincount(powers, sizes)
    return tuple(
        SizeClass(1 << power, int(counts[power]), int(sums[power])) for power in np.flatnonzero(counts).tolist()
    )


def _lifetimes(spans: NDArray[np.int64]) -> tuple[LifeClass, ...]:
    borders = 10 ** np.arange(1, 19)  # nanoseconds
    counts = np.bincount(np.searchsorted(borders, spans, side="right"), minlength=len(borders) + 1).tolist()
    return tuple(LifeClass(10.0 ** (at + 1 - 9), count) for at, count in enumerate(counts) if count)
