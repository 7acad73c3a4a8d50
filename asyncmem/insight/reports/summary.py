"""`summary`: what records come to, as figures and as text for one screen."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, final

import numpy as np

from asyncmem.core import Kind, Level
from asyncmem.figures import format_count, format_duration, format_share, format_size
from asyncmem.text import printable

if TYPE_CHECKING:
    from asyncmem.insight.groups import Group
    from asyncmem.insight.names import PoolName
    from asyncmem.insight.records import Records

TOP: Final = 5
_LEVELS: Final = {
    Level.STREAM_CACHE: "stream cache",
    Level.SHARED_CACHE: "shared cache",
    Level.MAPPED: "free memory",
    Level.FOREIGN: "other streams' memory",
    Level.MISS: "waiting",
}


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
        most_reserved: The most bytes that were had from the device.
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


def summary(records: Records) -> Summary:
    """Return what records come to."""
    peak = records.peak()
    at_peak, at_end = records.live_at(peak.time), records.live_at()
    taken, waits = records.of(Kind.ALLOCATED), records.of(Kind.WAITED).rows["span_ns"]
    grown = records.grown().nbytes
    levels = np.bincount(taken.rows["level"], minlength=len(Level)).tolist()
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
        served={level.name.lower(): levels[level] for level in Level},
        hit_rate=records.hit_rate(),
        live_buffers=len(at_end),
        live=at_end.nbytes,
        waits=len(waits),
        waited=float(waits.sum(dtype=float)) / 1e9,
        longest_wait=int(waits.max(initial=0)) / 1e9,
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
