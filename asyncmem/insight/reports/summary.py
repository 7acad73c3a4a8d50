"""`summary`, `stats` and `analyze_allocation_patterns`: what records come to, and what would help."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple, final

import numpy as np

from asyncmem.core import GRANULE, Kind, Level
from asyncmem.figures import format_count, format_duration, format_share, format_size
from asyncmem.insight.groups import Group, Grouped, classes
from asyncmem.insight.names import PoolName
from asyncmem.insight.recording import Source, records_of
from asyncmem.insight.records import Records
from asyncmem.insight.reports.display import Bar, bars
from asyncmem.text import printable
from asyncmem.units import parse_size

TOP: Final = 5
_LEVELS: Final = {
    Level.STREAM_CACHE: "stream cache",
    Level.SHARED_CACHE: "shared cache",
    Level.MAPPED: "free memory",
    Level.FOREIGN: "other streams' memory",
    Level.MISS: "growth or waiting",
}
LOW_HIT_RATE: Final = 0.5
HIGH_FRAGMENTATION: Final = 0.3
_SIZES: Final = 256
"""So many sizes are looked at."""
_OFTEN: Final = 0.01
"""The share of all allocations that makes a size worth a warm-up."""
_FEW: Final = 20
"""So many allocations say nothing of a rate: a program's first are misses."""
_POWERS_OF_TWO: Final = 1 << np.arange(63)
_POWERS_OF_TEN: Final = 10 ** np.arange(1, 19)


@final
@dataclass(frozen=True, kw_only=True)
class Summary:
    """What records come to.

    Attributes:
        records: How many they are.
        seconds: How long was recorded.
        pools: The pools that were recorded.
        peak: The most bytes that were live.
        peak_at: After how many seconds that was.
        most_reserved: The most bytes that were reserved.
        grown: Bytes that came from it while it was recorded.
        given_back: Bytes that went back to it.
        there_before: Bytes that the pools had before.
        allocations: How many allocations there were.
        allocated: Their bytes together.
        served: How many of them each level served, by the names of `Level`.
        hit_rate: The share of them that was served at once from memory that the pool had; 1 without any.
        live_buffers: How many buffers were still live at the end.
        live: Bytes of those.
        waits: How many requests waited for others to free memory.
        waited: Seconds that they waited together.
        longest_wait: Seconds of the longest wait.
        out_of_memory: How many requests were refused.
        tags: What was live at the peak by tag, largest first.
        lines: The same by line.
    """

    records: int
    seconds: float
    pools: tuple[PoolName, ...]
    peak: int
    peak_at: float
    most_reserved: int
    grown: int
    given_back: int
    there_before: int
    allocations: int
    allocated: int
    served: dict[str, int]
    hit_rate: float
    live_buffers: int
    live: int
    waits: int
    waited: float
    longest_wait: float
    out_of_memory: int
    tags: tuple[Group, ...]
    lines: tuple[Group, ...]

    def _repr_html_(self) -> str:
        waited = f"{format_count(self.waits, 'wait')} of {format_duration(self.waited)}"
        title = f"{format_size(self.peak)} live at the peak, {format_size(self.most_reserved)} reserved, {waited}"
        return bars(title, _bars(self.lines))


def summary(records: Records) -> Summary:
    """Return what records come to."""
    peak = records.peak()
    at_peak, at_end = records.live_at(peak.time), records.live_at()
    taken, waits = records.of(Kind.ALLOCATED), records.of(Kind.WAITED)
    grown = records.grown().nbytes
    return Summary(
        records=len(records),
        seconds=records.duration,
        pools=tuple(records.names.pools),
        peak=peak.nbytes,
        peak_at=peak.time,
        most_reserved=records.most_reserved(),
        grown=grown,
        given_back=records.of(Kind.TRIMMED).nbytes,
        there_before=records.of(Kind.GREW).nbytes - grown,
        allocations=len(taken),
        allocated=taken.nbytes,
        served=records.served(),
        hit_rate=records.hit_rate(),
        live_buffers=len(at_end),
        live=at_end.nbytes,
        waits=len(waits),
        waited=waits.seconds,
        longest_wait=int(waits.rows["span_ns"].max(initial=0)) / 1e9,
        out_of_memory=len(records.of(Kind.OUT_OF_MEMORY)),
        tags=at_peak.by("tag"),
        lines=at_peak.by("site"),
    )


def summarize(records: Records) -> str:
    """Return a `summary` as text: the peak and whose it was, what served allocations, how long requests waited."""
    found = summary(records)
    lost = f", {records.lost:,} lost before them" if records.lost else ""
    pools = ", ".join(f"{printable(pool.name)} on {printable(pool.device)}" for pool in found.pools)
    levels = ((name, found.served[level.name.lower()]) for level, name in _LEVELS.items())
    served = ", ".join(f"{name} {count:,}" for name, count in levels if count)
    before = f"; {format_size(found.there_before)} there before" if found.there_before else ""
    waited = f"{format_count(found.waits, 'time')}, {format_duration(found.waited)} in all"
    rows = [
        ("recorded", f"{format_count(found.records, 'record')} in {format_duration(found.seconds)}{lost}"),
        ("pools", pools or "none"),
        ("peak", f"{format_size(found.peak)} live after {format_duration(found.peak_at)}"),
        ("allocated", f"{format_size(found.allocated)} in {format_count(found.allocations, 'allocation')}"),
        ("served by", f"{served or 'nothing'} ({format_share(found.hit_rate)} hits)"),
        ("still live", f"{format_size(found.live)} in {format_count(found.live_buffers, 'buffer')}"),
        ("growth", f"{format_size(found.grown)} had, {format_size(found.given_back)} given back{before}"),
        ("waited", f"{waited}, the longest {format_duration(found.longest_wait)}" if found.waits else "never"),
    ]
    if found.out_of_memory:
        rows.append(("out of memory", format_count(found.out_of_memory, "time")))
    lines = [f"{name:<14} {text}" for name, text in rows]
    if records.note:
        lines.append(records.note)
    lines += _largest("at the peak, by tag", found.tags)
    lines += _largest("at the peak, by line", found.lines)
    return "\n".join(lines)


def _largest(heading: str, groups: tuple[Group, ...]) -> list[str]:
    """Return the largest groups as lines below a heading; nothing where none has a name."""
    if all(group.name == "?" for group in groups):
        return []
    found = [(group.nbytes, group.allocations, printable(group.name)) for group in groups[:TOP]]
    if rest := groups[TOP:]:
        sums = sum(group.nbytes for group in rest), sum(group.allocations for group in rest)
        found.append((*sums, f"{len(rest):,} others"))
    return [f"{heading}:", *(f"  {format_size(nbytes):>11}  {count:>7,}  {name}" for nbytes, count, name in found)]


# -- sizes, lifetimes, and what is asked for again and again -----------------------------------------------------------


class SizePattern(NamedTuple):
    """What is asked for in one size.

    Attributes:
        nbytes: The size.
        allocations: How often it was asked for.
        hit_rate: The share that was served at once from memory that the pool had.
        most_live: How many of them were live at once, at most.
        mean_lifetime: Seconds from allocation to free, on average over those that were freed.
    """

    nbytes: int
    allocations: int
    hit_rate: float
    most_live: int
    mean_lifetime: float

    def __str__(self) -> str:
        """Return one line about it."""
        return (
            f"{format_size(self.nbytes):>11}  {self.allocations:>9,}  {format_share(self.hit_rate):>6} hits  "
            f"{self.most_live:>7,} at once  {format_duration(self.mean_lifetime)} held"
        )


@final
@dataclass(frozen=True, kw_only=True)
class AllocationPatterns:
    """What a program asks for, how it is served, and what would help.

    Attributes:
        allocations: How many there were.
        sizes: What was asked for in each size, the most bytes first: at most 256 sizes, each asked for more than once.
        efficiency_score: The share of allocations served at once from memory that the pool had; 1 without any.
        memory_efficiency: The most that was live, for each byte that was reserved at most; 1 where nothing was.
        fragmentation_ratio: The share of the reserved memory that was in no buffer at the peak, rounding included.
        waited: Seconds that requests have spent in the queue, added up.
        warmup: Sizes and counts for `PoolOptions.warmup`, with which the first requests would have been hits.
        warnings: What is wrong, and what to do about it.
    """

    allocations: int
    sizes: tuple[SizePattern, ...]
    efficiency_score: float
    memory_efficiency: float
    fragmentation_ratio: float
    waited: float
    warmup: tuple[tuple[int, int], ...]
    warnings: tuple[str, ...]

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
    """Allocations of about one size.

    Attributes:
        below: They have fewer bytes than this, and at least half of it.
        allocations: How many they are.
        nbytes: Their bytes together.
    """

    below: int
    allocations: int
    nbytes: int


class LifeClass(NamedTuple):
    """Buffers that were held for about as long.

    Attributes:
        below: They were held for fewer seconds than this, and at least for a tenth of it.
        buffers: How many they are.
    """

    below: float
    buffers: int


@final
@dataclass(frozen=True, kw_only=True)
class Stats:
    """What allocations are like.

    Attributes:
        allocations: How many there were.
        allocated: Their bytes together.
        smallest: Bytes of the smallest.
        median: Bytes of the one in the middle.
        largest: Bytes of the largest.
        sizes: How they spread over sizes, smallest first.
        lifetimes: How those that were freed spread over the time that they were held, shortest first.
        served: How many each level served, by the names of `Level`.
        lines: Which lines allocated, the most bytes first.
        patterns: What is asked for again and again, and what would help.
    """

    allocations: int
    allocated: int
    smallest: int
    median: int
    largest: int
    sizes: tuple[SizeClass, ...]
    lifetimes: tuple[LifeClass, ...]
    served: dict[str, int]
    lines: tuple[Group, ...]
    patterns: AllocationPatterns

    def _repr_html_(self) -> str:
        sizes = [
            Bar(f"below {format_size(one.below)}", one.allocations, format_count(one.allocations, "allocation"))
            for one in self.sizes
        ]
        title = f"{format_size(self.allocated)} in {format_count(self.allocations, 'allocation')}"
        return bars(title, sizes) + bars("by line", _bars(self.lines))


def _bars(groups: tuple[Group, ...]) -> list[Bar]:
    return [
        Bar(one.name, one.nbytes, f"{format_size(one.nbytes)} in {format_count(one.allocations, 'allocation')}")
        for one in groups
    ]


def stats(records: Records) -> Stats:
    """Return what the allocations are like."""
    taken = records.of(Kind.ALLOCATED)
    sizes = np.sort(taken.rows["nbytes"].astype(np.int64))
    smallest, median, largest = sizes[[0, (len(sizes) - 1) // 2, -1]].tolist() if len(sizes) else (0, 0, 0)
    spans = records.of(Kind.FREED).rows["span_ns"]
    return Stats(
        allocations=len(sizes),
        allocated=taken.nbytes,
        smallest=smallest,
        median=median,
        largest=largest,
        sizes=tuple(SizeClass(int(below), count, nbytes) for below, count, nbytes in classes(sizes, _POWERS_OF_TWO)),
        lifetimes=tuple(LifeClass(below / 1e9, count) for below, count, _ in classes(spans, _POWERS_OF_TEN)),
        served=records.served(),
        lines=taken.by("site"),
        patterns=analyze_allocation_patterns(records),
    )


def analyze_allocation_patterns(source: Source | None = None) -> AllocationPatterns:
    """Look for what a program asks for again and again.

    Args:
        source: A recording, a profile, a tracker or records; what `set_memory_debug` records without one.

    Raises:
        InvalidRequest: There is no source, and nothing records in the background.
    """
    records = records_of(source)
    reserved = records.most_reserved()
    live = min(records.peak().nbytes, reserved)
    efficiency = live / reserved if reserved else 1.0
    rate = records.hit_rate()
    sizes, count = _sizes(records), len(records.of(Kind.ALLOCATED))
    return AllocationPatterns(
        allocations=count,
        sizes=sizes,
        efficiency_score=rate,
        memory_efficiency=efficiency,
        fragmentation_ratio=1.0 - efficiency,
        waited=records.of(Kind.WAITED).seconds,
        warmup=tuple((one.nbytes, one.most_live) for one in sizes if one.allocations >= _OFTEN * count),
        warnings=tuple(_warnings(records, rate, reserved, live)),
    )


def _sizes(records: Records) -> tuple[SizePattern, ...]:
    rows = records.of(Kind.ALLOCATED, Kind.FREED, Kind.HELD).rows
    by_size = Grouped(rows["nbytes"], int)
    taken, freed = rows["kind"] == Kind.ALLOCATED, rows["kind"] == Kind.FREED
    hits = taken & ~np.isin(rows["level"], (Level.MISS, Level.FOREIGN))
    columns = zip(
        by_size.keys,
        by_size.count(taken),
        by_size.count(hits),
        by_size.peaks(np.where(freed, -1, 1)).tolist(),
        by_size.sum(rows["span_ns"] * freed),
        by_size.count(freed),
        strict=True,
    )
    found = [
        SizePattern(nbytes, count, hit / count, most, held / max(frees, 1) / 1e9)
        for nbytes, count, hit, most, held, frees in columns
        if count > 1
    ]
    return tuple(sorted(found, key=lambda one: -one.nbytes * one.allocations)[:_SIZES])


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
