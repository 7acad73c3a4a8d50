"""The state of a pool, budget or lease: statistics, waiting requests, a summary, and changes of the pressure."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final, Self

from asyncmem.figures import format_count, format_duration, format_share, format_size
from asyncmem.pool.latch import Latch
from asyncmem.pool.owners import held_by, name_of
from asyncmem.stats import PoolStats, Pressure, SegmentInfo, WaiterInfo
from asyncmem.text import printable, quoted

if TYPE_CHECKING:
    from collections.abc import Iterable

    from asyncmem.pool.ports import AnyShare, Opened

_ARENAS = ("small", "large")
_LOOKS: Final = 100
"""The most that are taken for one answer."""


def segment_infos(opened: Opened) -> tuple[SegmentInfo, ...]:
    """Return the segments that a pool has from its device."""
    kinds = {address: segments[-1].kind for address, segments in opened.executor.segments.copy().items()}
    return tuple(
        SegmentInfo(
            address=one.address, nbytes=one.nbytes,
            kind="paged" if one.segment in opened.executor.spaces else kinds.get(one.address, "?"),
            arena=_ARENAS[one.arena], live=one.live, largest_hole=min(one.largest, one.free),
        )
        for one in opened.core.segments()
        if one.nbytes and one.arena < len(_ARENAS)
    )  # fmt: skip


def largest_hole(opened: Opened) -> int:
    """Return the longest range that is free or would be after a flush: a segment of which nothing is held is one.

    Pages may be moved to where a range lacks some, so there it is as long as there is free memory for it.
    """
    core = opened.core
    whole = (one.nbytes for one in core.segments() if one.live == 0)
    return min(max(core.largest(), *whole, 0), core.reserved() - core.live())


def stats_of(share: AnyShare) -> PoolStats:
    """Return the figures of a pool, which is opened for that, or what a budget or a lease has of its own.

    Take a look that no other thread's use of the pool has come into the middle of. The figures are read by several
    calls, and threads take turns between any two of them. A thread's turn is a hundred times as long as a look, so the
    second one is undisturbed; only turns shorter than a look could disturb them all.
    """
    looks = 0
    while True:
        opened = share._opened  # raises where it has been closed
        before = _moment(share, opened)
        stats = _pool_stats(share, opened) if share is opened.pool else _share_stats(share, opened)
        looks += 1
        if looks == _LOOKS or _moment(share, opened) == before:
            return stats


def _moment(share: AnyShare, opened: Opened) -> tuple[object, ...]:
    scheduler = opened.core.scheduler
    return share._account, opened.limit, opened.core.counts(), scheduler.gauges(), scheduler.tally()


def _pool_stats(pool: AnyShare, opened: Opened) -> PoolStats:
    core = opened.core
    gauges, tally = core.scheduler.gauges(), core.scheduler.tally()
    counts, retired, whole = core.counts(), opened.retire.counts(), core.account(0)
    misses = tally.pop("misses") + gauges["foreign"]
    memory, limit = opened.executor.memory, opened.limit
    return PoolStats(
        name=pool.name, device=opened.device.name, limit=limit, pressure=Pressure.of(counts.live / max(limit, 1)),
        allocated_bytes=counts.live, active_bytes=whole.requested, reserved_bytes=counts.reserved,
        cached_bytes=counts.reserved - counts.live,
        inactive_split_bytes=counts.reserved - counts.live - counts.empty - core.idle_memory()[0],
        pending_fence_bytes=core.pending(),
        exported_bytes=core.exported_bytes, pinned_bytes=opened.pinned_bytes,
        spilled_bytes=opened.spilling.nbytes, captured_bytes=opened.captures.nbytes,
        largest_hole=largest_hole(opened),
        peak_allocated=counts.peak_live, peak_cached=counts.peak_cached, peak_reserved=counts.peak_reserved,
        total_memory=memory.total, free_memory=memory.free, active_buffers=counts.live_blocks,
        segments=counts.segments, num_allocations=counts.allocations,
        num_frees=counts.allocations - counts.live_blocks,  # with the ranges of leases that have ended
        hits_stream=counts.stream_hits, hits_shared=counts.shared_hits, hits_mapped=max(0, counts.placed - misses),
        num_cache_misses=misses, driver_calls=opened.device.driver_calls,
        grows=gauges["grows"], trims=gauges["trims"],
        bypassed_bytes=gauges["overtaken"],
        late_fences=retired.late_fences, loop_blocking_calls=opened.loop_blocking_calls,
        cpu_fallbacks=opened.cpu_fallbacks, spills=opened.spilling.spills, returns=opened.spilling.returns,
        remedies=gauges["means"] | opened.executor.asked,
        **tally | {"timeouts": tally["timeouts"] + opened.spilling.timeouts},
    )  # fmt: skip


_COUNTERS = (
    "num_allocations", "num_frees", "hits_stream", "hits_shared", "hits_mapped", "num_cache_misses", "driver_calls",
    "grows", "trims", "waits", "wait_seconds", "growth_waits", "growth_seconds", "bypassed_bytes", "handed_back",
    "timeouts", "cancellations", "deadlocks", "late_fences", "loop_blocking_calls", "cpu_fallbacks", "spills",
    "returns",
)  # fmt: skip


def counters(stats: PoolStats) -> dict[str, float]:
    """Return what only grows, to be taken off later figures."""
    return {name: getattr(stats, name) for name in _COUNTERS}


def since(stats: PoolStats, counted: dict[str, float]) -> PoolStats:
    """Return the figures with the counters as they have grown since then."""
    return replace(stats, **{name: getattr(stats, name) - before for name, before in counted.items()})


def _share_stats(share: AnyShare, opened: Opened) -> PoolStats:
    core = opened.core
    counts, tally, limit = core.account(share._account), core.scheduler.tally(share._account), share._own_limit()
    misses = tally.pop("misses")
    return PoolStats(
        name=share.name, device=opened.device.name, limit=limit, pressure=Pressure.of(counts.live / max(limit, 1)),
        allocated_bytes=counts.live, active_bytes=counts.requested, peak_allocated=counts.peak,
        num_allocations=counts.allocations, num_frees=counts.allocations - counts.blocks,
        active_buffers=counts.blocks, hits_stream=counts.stream_hits,
        hits_shared=counts.shared_hits, hits_mapped=max(0, counts.placed - misses),
        num_cache_misses=misses, reserved_bytes=limit if share._is_lease else 0,
        largest_hole=core.largest(share._arena) if share._is_lease else 0, **tally,
    )  # fmt: skip


def waiter_infos(share: AnyShare) -> tuple[WaiterInfo, ...]:
    """Return the waiting requests of a share and its parts, in the order of arrival."""
    opened = share._opened
    core = opened.core
    held = held_by(core)
    return tuple(
        WaiterInfo(
            owner=name_of(core, one["owner"]), held=held.get(one["owner"], 0), tag=getattr(one["request"], "tag", None),
            share=opened.share_at(one["account"]).name,
            **{name: one[name] for name in ("nbytes", "age", "priority", "remaining", "growing")},
        )
        for one in opened.requests_in(share)
    )  # fmt: skip


def summary(stats: PoolStats) -> str:
    """Lay the figures of a pool out on one screen."""
    return "\n".join(f"{name:<14} {text}" for name, text in _rows(stats))


def state_line(opened: Opened, *, closed: bool) -> str:
    """Return what a pool is and has, in a line."""
    core = opened.core
    return (
        f"{quoted(opened.name)} on {printable(opened.device.name)}: {'closed, ' if closed else ''}"
        f"{format_size(core.live())} live, {format_size(core.reserved())} reserved, "
        f"limit {format_size(opened.limit)}, {core.scheduler.gauges()['waiting']} waiting"
    )


def html_summary(stats: PoolStats, budgets: Iterable[PoolStats]) -> str:
    """Return the figures of a pool and its budgets as a table for a notebook."""
    from html import escape

    rows = _rows(stats)
    for one in budgets:
        live = f"{format_size(one.allocated_bytes)} of {format_size(one.limit or 0)} live"
        waiting = f"{one.waiting} waiting for {format_size(one.waiting_bytes)}"
        rows.append((f"budget {printable(one.name)}", f"{live}, {waiting}"))
    left = 'style="text-align: left"'
    cells = (f"<tr><th {left}>{escape(name)}</th><td {left}>{escape(text)}</td></tr>" for name, text in rows)
    return f"<table>{''.join(cells)}</table>"


def _rows(stats: PoolStats) -> list[tuple[str, str]]:
    live = f"{format_size(stats.allocated_bytes)} in {format_count(stats.active_buffers, 'buffer')}"
    reserved = f"{format_size(stats.reserved_bytes)} in {format_count(stats.segments, 'segment')}"
    waits = f"{format_count(stats.waits, 'wait')} so far, the longest {format_duration(stats.longest_wait)}"
    growths = f"{format_count(stats.growth_waits, 'request')} so far"
    rows = [
        ("pool", f"{printable(stats.name)} on {printable(stats.device)}"),
        ("live", f"{live} (peak {format_size(stats.peak_allocated)})"),
        ("reserved", f"{reserved} (peak {format_size(stats.peak_reserved)}, limit {format_size(stats.limit or 0)})"),
        ("pressure", stats.pressure.name),
        ("hits", f"{format_share(stats.cache_hit_rate)} of {format_count(stats.num_allocations, 'allocation')}"),
        ("waiting", f"{stats.waiting} for {format_size(stats.waiting_bytes)} ({waits})"),
        ("growing", f"{stats.growing} for {format_size(stats.growing_bytes)} ({growths})"),
        ("fragmentation", format_share(stats.fragmentation)),
    ]
    if stats.spills or stats.spilled_bytes:
        moved = f"{format_count(stats.spills, 'buffer')} so far, {stats.returns} came back"
        rows.append(("spilled", f"{format_size(stats.spilled_bytes)} ({moved})"))
    return rows


_DWELL: Final = 0.1
"""Seconds that a lower level lasts before it is reported. A higher one is reported at once."""


class PressureChanges:
    """The levels as they change, for one reader: ``async for level in pool.pressure_changes()``.

    A rise is reported at once. A fall is reported after the level has stayed lower for a tenth of a second, as the
    highest of that time, so that a program on the border of two levels does not see each crossing. It ends with the
    pool.
    """

    def __init__(self, opened: Opened) -> None:
        """Begin with the level of this moment.

        Raises:
            PoolClosed: The pool is closed.
        """
        opened.need_open()
        level = Pressure(opened.core.scheduler.gauges()["pressure"])
        self._pool = opened
        self._told = level
        self._level = level
        self._rises: list[Pressure] = []  # to be told, each above the one before
        self._fallen: float | None = None  # since when it has been lower than what was told, and is to be told, last
        self._highest = level  # since then
        self.ended = False
        self._changed: Latch[None] = Latch()

    def put(self, level: Pressure | None) -> None:
        """Note a level, or None for the end."""
        if level is None:
            self.ended = True
        else:
            self._change(level)
        changed, self._changed = self._changed, Latch()
        changed()

    def _change(self, level: Pressure) -> None:
        self._level = level
        last = self._rises[-1] if self._rises else self._told
        if level >= last:
            self._fallen = None
            self._rises += [level] if level > last else []
        elif self._fallen is None:
            self._fallen, self._highest = self._pool.core.time, level
        else:
            self._highest = max(self._highest, level)

    def __aiter__(self) -> Self:
        """Return itself."""
        return self

    async def __anext__(self) -> Pressure:
        """Wait for the next change. Cancelled: it is not lost, and comes with the next call."""
        while True:
            changed = self._changed  # before looking, as another thread may change it meanwhile
            level = self._next()
            if level is not None:
                self._told = level
                return level
            if self.ended:
                raise StopAsyncIteration
            await changed.wait(None if self._fallen is None else self._fallen + _DWELL - self._pool.core.time)

    def _next(self) -> Pressure | None:
        """Return the next level to tell."""
        if self._rises:
            return self._rises.pop(0)
        now = self._pool.core.time
        if self._fallen is None or (now < self._fallen + _DWELL and not self.ended):
            return None
        level, self._highest = self._highest, self._level
        self._fallen = now if self._level < level else None
        return level
