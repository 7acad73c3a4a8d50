"""`stats` and `analyze_allocation_patterns`: sizes, lifetimes and hits of the allocations, and what would help."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple, final

import numpy as np

from asyncmem.core import GRANULE, Kind, Level
from asyncmem.figures import format_count, format_duration, format_share, format_size
from asyncmem.insight.debug import Source, records_of
from asyncmem.units import parse_size

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from asyncmem.insight.groups import Group
    from asyncmem.insight.records import Records


LOW_HIT_RATE: Final = 0.5
HIGH_FRAGMENTATION: Final = 0.3
_SIZES: Final = 256
"""So many sizes are looked at."""
_OFTEN: Final = 0.01
"""The share of all allocations that makes a size worth a warm-up."""
_FEW: Final = 20
"""So many allocations say nothing of a rate: a program's first are misses."""


class SizePattern(NamedTuple):
    """What is asked for in one size."""

    nbytes: int
    """The size."""
    allocations: int
    """How often it was asked for."""
    hit_rate: float
    """The share that was served at once from memory that the pool had."""
    most_live: int
    """How many of them were live at once, at most."""
    mean_lifetime: float
    """Seconds that those which were freed were held, on average."""

    def __str__(self) -> str:
        """Return one line about it."""
        return (
            f"{format_size(self.nbytes):>11}  {self.allocations:>9,}  {format_share(self.hit_rate):>6} hits  "
            f"{self.most_live:>7,} at once  {format_duration(self.mean_lifetime)} held"
        )


@final
@dataclass(frozen=True, kw_only=True)
class AllocationPatterns:
    """What a program asks for, how it is served, and what would help."""

    allocations: int
    """How many there were."""
    sizes: tuple[SizePattern, ...]
    """What was asked for in each size, the most bytes first: 256 sizes at most, and none that was asked for once."""
    efficiency_score: float
    """The share of allocations served at once from memory that the pool had; 1 without any."""
    memory_efficiency: float
    """The most that was live, for each byte that was reserved at most; 1 where nothing was."""
    fragmentation_ratio: float
    """The share of the reserved memory that was in no buffer when the most was live, with what rounding takes."""
    waited: float
    """Seconds that requests have spent in the queue, added up."""
    warmup: tuple[tuple[int, int], ...]
    """Sizes and counts for `PoolOptions.warmup`, with which the first requests would have been hits."""
    warnings: tuple[str, ...]
    """What is wrong, and what to do about it."""

    def __str__(self) -> str:
        """Return it as text for one screen."""
        figures = [
            format_count(self.allocations, "allocation"),
            f"{format_share(self.efficiency_score)} hits",
            f"memory efficiency {format_share(self.memory_efficiency)}",
            f"fragmentation {format_share(self.fragmentation_ratio)}",
        ]
        lines = [", ".join(figures)]
        lines += [f"  {size}" for size in self.sizes[:10]]
        if self.warmup:
            pairs = ", ".join(f"({_exact(nbytes)}, {count})" for nbytes, count in self.warmup[:10])
            lines.append(f"warmup=[{pairs}]")
        return "\n".join([*lines, *self.warnings])


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
    """Return what the allocations are like."""
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


def analyze_allocation_patterns(source: Source | None = None) -> AllocationPatterns:
    """Look for what a program asks for again and again.

    Args:
        source: A recording, a profile, a tracker or records; what `set_memory_debug` records without one.

    Raises:
        InvalidRequest: There is no source, and nothing records in the background.
    """
    records = records_of(source)
    taken = records.of(Kind.ALLOCATED)
    reserved = records.most_reserved()
    live = min(records.peak().nbytes, reserved)
    efficiency = live / reserved if reserved else 1.0
    rate = records.hit_rate()
    sizes, warmup = _patterns(records)
    return AllocationPatterns(
        allocations=len(taken),
        sizes=sizes,
        efficiency_score=rate,
        memory_efficiency=efficiency,
        fragmentation_ratio=1.0 - efficiency,
        waited=float(records.of(Kind.WAITED).rows["span_ns"].sum(dtype=float)) / 1e9,
        warmup=warmup,
        warnings=tuple(_warnings(records, rate, reserved, live)),
    )


def _patterns(records: Records) -> tuple[tuple[SizePattern, ...], tuple[tuple[int, int], ...]]:
    taken = records.of(Kind.ALLOCATED).rows["nbytes"].astype(np.int64)
    sizes, counts = np.unique(taken, return_counts=True)
    sizes, counts = sizes[counts > 1], counts[counts > 1]
    largest = sizes[np.argsort(-sizes * counts, kind="stable")[:_SIZES]]
    rows = records.of(Kind.ALLOCATED, Kind.FREED, Kind.HELD).rows
    rows = rows[np.isin(rows["nbytes"], largest)]
    order = np.argsort(rows["nbytes"], kind="stable")
    borders = np.flatnonzero(np.diff(rows["nbytes"][order].astype(np.int64))) + 1
    found = [_pattern(group) for group in np.split(rows[order], borders) if len(group)]
    found.sort(key=lambda one: -one.nbytes * one.allocations)
    warmup = tuple((one.nbytes, one.most_live) for one in found if one.allocations >= _OFTEN * len(taken))
    return tuple(found), warmup


def _pattern(group: NDArray[np.void]) -> SizePattern:
    kinds = group["kind"]
    freed, levels = group[kinds == Kind.FREED], group["level"][kinds == Kind.ALLOCATED]
    change = np.where(kinds == Kind.FREED, -1, 1)
    return SizePattern(
        nbytes=int(group["nbytes"][0]),
        allocations=len(levels),
        hit_rate=float(np.mean(~np.isin(levels, (Level.MISS, Level.FOREIGN)))),
        most_live=int(np.cumsum(change).max()),
        mean_lifetime=float(freed["span_ns"].mean()) / 1e9 if len(freed) else 0.0,
    )


def _exact(nbytes: int) -> str:
    text = format_size(nbytes)
    return f'"{text}"' if parse_size(text) == nbytes else str(nbytes)


def _warnings(records: Records, rate: float, reserved: int, live: int) -> list[str]:
    found = []
    sizes = len(np.unique(-(-records.of(Kind.ALLOCATED).rows["nbytes"].astype(np.int64) // GRANULE)))
    count = len(records.of(Kind.ALLOCATED))
    if count > _FEW and rate < LOW_HIT_RATE:
        various = "round sizes up to a few that come again"
        short = "give the pool a warmup, or a higher limit"
        found.append(
            f"Only {format_share(rate)} of the allocations were hits: {various if sizes * 2 > count else short}."
        )
    if reserved and 1 - live / reserved > HIGH_FRAGMENTATION:
        found.append(
            f"{format_size(reserved - live)} of {format_size(reserved)} reserved were in no buffer even at the peak: "
            "allocate what lives long first, or take a smaller segment_size."
        )
    return found
