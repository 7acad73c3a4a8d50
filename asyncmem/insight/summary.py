"""What records come to, as text for one screen."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from asyncmem.core import Kind, Level
from asyncmem.figures import format_count, format_duration, format_share, format_size

if TYPE_CHECKING:
    from asyncmem.insight.groups import Group
    from asyncmem.insight.records import Records

TOP = 5


def summarize(records: Records) -> str:
    """Lay out what happened: how much was live at most and whose that was, what served it, who waited."""
    peak = records.peak()
    rows = [
        ("recorded", _recorded(records)),
        ("pools", ", ".join(f"{pool.name} on {pool.device}" for pool in records.names.pools) or "none"),
        ("peak", f"{format_size(peak.nbytes)} live after {format_duration(peak.time)}"),
        ("allocated", _allocated(records)),
        ("served by", _served(records)),
        ("still live", _held(records.live_at())),
        ("growth", _growth(records)),
        ("waited", _waited(records)),
    ]
    refused = len(records.of(Kind.OUT_OF_MEMORY))
    if refused:
        rows.append(("out of memory", format_count(refused, "time")))
    lines = [f"{name:<14} {text}" for name, text in rows]
    if records.note:
        lines.append(records.note)
    at_peak = records.live_at(peak.time)
    lines += table("at the peak, by tag", at_peak.by("tag"))
    lines += table("at the peak, by line", at_peak.by("site"))
    return "\n".join(lines)


def table(heading: str, groups: tuple[Group, ...]) -> list[str]:
    """Lay out the largest groups below a heading; nothing where none has a name."""
    if all(group.name == "?" for group in groups):
        return []
    lines = [f"{heading}:"]
    lines += [f"  {format_size(group.nbytes):>11}  {group.allocations:>7,}  {group.name}" for group in groups[:TOP]]
    rest = groups[TOP:]
    if rest:
        nbytes = sum(group.nbytes for group in rest)
        lines.append(
            f"  {format_size(nbytes):>11}  {sum(group.allocations for group in rest):>7,}  {len(rest):,} others"
        )
    return lines


def hit_rate(records: Records) -> float:
    """Answer the share of allocations that were served at once from memory that the pool had; 1 without any."""
    levels = records.of(Kind.ALLOCATED).rows["level"]
    return float(np.mean(~np.isin(levels, (Level.MISS, Level.FOREIGN)))) if len(levels) else 1.0


def _recorded(records: Records) -> str:
    lost = f", {records.lost:,} lost before them" if records.lost else ""
    return f"{format_count(len(records), 'record')} in {format_duration(records.duration)}{lost}"


def _nbytes(records: Records) -> int:
    return int(records.rows["nbytes"].sum())


def _allocated(records: Records) -> str:
    taken = records.of(Kind.ALLOCATED)
    return f"{format_size(_nbytes(taken))} in {format_count(len(taken), 'allocation')}"


def _served(records: Records) -> str:
    levels = np.bincount(records.of(Kind.ALLOCATED).rows["level"], minlength=len(Level))
    names = {
        Level.STREAM_CACHE: "stream cache",
        Level.SHARED_CACHE: "shared cache",
        Level.MAPPED: "free memory",
        Level.FOREIGN: "other streams' memory",
        Level.MISS: "waiting",
    }
    parts = [f"{name} {levels[level]:,}" for level, name in names.items() if levels[level]]
    return f"{', '.join(parts) or 'nothing'} ({format_share(hit_rate(records))} hits)"


def _held(live: Records) -> str:
    return f"{format_size(_nbytes(live))} in {format_count(len(live), 'buffer')}"


def _growth(records: Records) -> str:
    all_had, had, back = map(_nbytes, (records.of(Kind.GREW), records.grown(), records.of(Kind.TRIMMED)))
    before = f"; {format_size(all_had - had)} there before" if all_had > had else ""
    return f"{format_size(had)} had, {format_size(back)} given back{before}"


def _waited(records: Records) -> str:
    waits = records.of(Kind.WAITED)
    if not len(waits):
        return "never"
    spans = waits.rows["span_ns"]
    longest, whole = format_duration(int(spans.max()) / 1e9), format_duration(int(spans.sum()) / 1e9)
    return f"{format_count(len(waits), 'time')}, {whole} in all, the longest {longest}"
