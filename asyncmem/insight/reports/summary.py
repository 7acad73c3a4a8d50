"""`summary`: what records come to, for one screen."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, final

from asyncmem.core import Kind
from asyncmem.insight.reserved import most_reserved
from asyncmem.insight.summary import hit_rate

if TYPE_CHECKING:
    from asyncmem.insight.groups import Group
    from asyncmem.insight.names import PoolName
    from asyncmem.insight.records import Records


@final
@dataclass(frozen=True, kw_only=True)
class Summary:
    """What records come to."""

    records: int
    """How many they are."""
    seconds: float
    """How long was recorded."""
    pools: tuple[PoolName, ...]
    """The pools that were recorded."""
    peak: int
    """The most bytes that were live,"""
    peak_at: float
    """and after how many seconds."""
    most_reserved: int
    """The most bytes that were had from the device."""
    grown: int
    """Bytes that came from it while it was recorded,"""
    given_back: int
    """and that went back."""
    allocations: int
    """How many allocations there were,"""
    allocated: int
    """and of how many bytes together."""
    hit_rate: float
    """The share of them that was served at once from memory that the pool had."""
    live_buffers: int
    """How many buffers were still live at the end,"""
    live: int
    """and how many bytes they hold."""
    waits: int
    """How many requests waited for others to free memory,"""
    waited: float
    """and for how many seconds together."""
    out_of_memory: int
    """How many requests were refused."""
    tags: tuple[Group, ...]
    """Whose the peak was by tag, largest first,"""
    lines: tuple[Group, ...]
    """and by line."""


def summary(records: Records) -> Summary:
    """Answer what records come to."""
    peak = records.peak()
    at_peak, at_end = records.live_at(peak.time), records.live_at()
    taken, waits = records.of(Kind.ALLOCATED), records.of(Kind.WAITED)
    return Summary(
        records=len(records),
        seconds=records.duration,
        pools=tuple(records.names.pools),
        peak=peak.nbytes,
        peak_at=peak.time,
        most_reserved=most_reserved(records),
        grown=int(records.grown().rows["nbytes"].sum()),
        given_back=int(records.of(Kind.TRIMMED).rows["nbytes"].sum()),
        allocations=len(taken),
        allocated=int(taken.rows["nbytes"].sum()),
        hit_rate=hit_rate(records),
        live_buffers=len(at_end),
        live=int(at_end.rows["nbytes"].sum()),
        waits=len(waits),
        waited=int(waits.rows["span_ns"].sum()) / 1e9,
        out_of_memory=len(records.of(Kind.OUT_OF_MEMORY)),
        tags=at_peak.by("tag"),
        lines=at_peak.by("site"),
    )
