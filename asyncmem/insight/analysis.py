"""`analyze_allocation_patterns`: what a program asks for again and again, how that is served, what would help."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple, final

import numpy as np

from asyncmem.core import GRANULE, Kind, Level
from asyncmem.figures import format_count, format_duration, format_share, format_size
from asyncmem.insight.reserved import most_reserved
from asyncmem.insight.sources import Source, records_of
from asyncmem.insight.summary import hit_rate
from asyncmem.units import parse_size

if TYPE_CHECKING:
    from numpy.typing import NDArray

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
        """Answer one line about it."""
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
    """The share of the memory reserved that nobody held when the most was live, with what rounding takes."""
    waited: float
    """Seconds that requests have spent in the queue, added up."""
    warmup: tuple[tuple[int, int], ...]
    """Sizes and counts for `PoolOptions.warmup`, with which the first requests would have been hits."""
    warnings: tuple[str, ...]
    """What is wrong, and what to do about it."""

    def __str__(self) -> str:
        """Answer it as text for one screen."""
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


def analyze_allocation_patterns(source: Source | None = None) -> AllocationPatterns:
    """Look for what a program asks for again and again.

    Args:
        source: A recording, a profile, a tracker or records; what `set_memory_debug` records without one.

    Raises:
        InvalidRequest: There is no source, and nothing records in the background.
    """
    records = records_of(source)
    taken = records.of(Kind.ALLOCATED)
    reserved = most_reserved(records)
    live = min(records.peak().nbytes, reserved)
    efficiency = live / reserved if reserved else 1.0
    rate = hit_rate(records)
    sizes, warmup = _sizes(records)
    return AllocationPatterns(
        allocations=len(taken),
        sizes=sizes,
        efficiency_score=rate,
        memory_efficiency=efficiency,
        fragmentation_ratio=1.0 - efficiency,
        waited=int(records.of(Kind.WAITED).rows["span_ns"].sum()) / 1e9,
        warmup=warmup,
        warnings=tuple(_warnings(records, rate, reserved, live)),
    )


def _sizes(records: Records) -> tuple[tuple[SizePattern, ...], tuple[tuple[int, int], ...]]:
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
            f"{format_size(reserved - live)} of {format_size(reserved)} reserved were held by nobody even at the peak: "
            "allocate what lives long first, or take a smaller segment_size."
        )
    return found
