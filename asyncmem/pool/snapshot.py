"""What a pool looks like now: statistics, tables of waiters, and the facts of an out-of-memory error."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from asyncmem.facts import OutOfMemoryFacts
from asyncmem.figures import format_count, format_duration, format_share, format_size
from asyncmem.pool.held import held_by_site, held_by_tag
from asyncmem.pool.holdings import label
from asyncmem.stats import PoolStats, Pressure, WaiterInfo

if TYPE_CHECKING:
    from asyncmem.core import Core
    from asyncmem.pool.flow import Flow
    from asyncmem.pool.pool import AsyncMemoryPool
    from asyncmem.pool.share import Share
    from asyncmem.pool.waiting import Waiting

_TOP = 5  # tags named in an error


def pool_stats(pool: AsyncMemoryPool) -> PoolStats:
    """Answer the figures of a pool, an opened one or not."""
    flow = pool.flow
    core, supply, tally = flow.core, flow.supply, flow.tally
    counts, retired, whole = core.counts(), flow.retire.counts(), core.account(0)
    misses = tally.misses + retired.foreign_takes
    memory = supply.memory
    return PoolStats(
        name=pool.name, device=pool.device.name, limit=supply.limit,
        pressure=Pressure.of(counts.live / max(supply.limit, 1)),
        allocated_bytes=counts.live, active_bytes=whole.requested, reserved_bytes=counts.reserved,
        cached_bytes=counts.reserved - counts.live,
        inactive_split_bytes=counts.reserved - counts.live - counts.empty - core.idle_memory()[0],
        pending_fence_bytes=core.pending(),
        exported_bytes=core.exported_bytes, pinned_bytes=flow.pins.nbytes,
        spilled_bytes=flow.spilling.nbytes, captured_bytes=flow.captures.nbytes, largest_hole=largest_hole(core),
        peak_allocated=counts.peak_live, peak_cached=counts.peak_cached, peak_reserved=counts.peak_reserved,
        total_memory=memory.total, free_memory=memory.free, active_buffers=counts.live_blocks,
        segments=counts.segments, num_allocations=counts.allocations, num_frees=counts.frees,
        hits_stream=counts.stream_hits, hits_shared=counts.shared_hits, hits_mapped=max(0, counts.placed - misses),
        num_cache_misses=misses, driver_calls=pool.device.driver_calls, grows=supply.grows, trims=supply.trims,
        waiting=sum(1 for _ in flow.waiters()), waiting_bytes=sum(one.nbytes for one in flow.waiters()),
        waits=tally.waits, wait_seconds=tally.wait_seconds, longest_wait=tally.longest_wait,
        bypassed_bytes=flow.queue.overtaken, handed_back=tally.handed_back, timeouts=tally.timeouts,
        cancellations=tally.cancellations, deadlocks=tally.deadlocks, late_fences=retired.late_fences,
        loop_blocking_calls=tally.loop_blocking_calls, cpu_fallbacks=tally.cpu_fallbacks,
        spills=tally.spills, returns=tally.returns, rungs=dict(tally.rungs),
    )  # fmt: skip


_COUNTERS = (
    "num_allocations", "num_frees", "hits_stream", "hits_shared", "hits_mapped", "num_cache_misses", "driver_calls",
    "grows", "trims", "waits", "wait_seconds", "bypassed_bytes", "handed_back", "timeouts", "cancellations",
    "deadlocks", "late_fences", "loop_blocking_calls", "cpu_fallbacks", "spills", "returns",
)  # fmt: skip


def largest_hole(core: Core) -> int:
    """Answer the longest range that is free or would be after a flush: a segment of which nothing is held is one.

    Pages may be moved to where a range lacks some, so there it is as long as there is free memory for it.
    """
    whole = (one.nbytes for one in core.segments() if one.live == 0)
    return min(max(core.largest(), *whole, 0), core.reserved() - core.live())


def counters(stats: PoolStats) -> dict[str, float]:
    """Answer what only grows, to be taken off later figures."""
    return {name: getattr(stats, name) for name in _COUNTERS}


def since(stats: PoolStats, counted: dict[str, float]) -> PoolStats:
    """Answer the figures with the counters as they have grown since then."""
    return replace(stats, **{name: getattr(stats, name) - before for name, before in counted.items()})


def share_stats(share: Share) -> PoolStats:
    """Answer what a budget or a lease has of its own."""
    flow = share.flow
    counts = flow.core.account(share._account)
    limit, tally = share.own_limit(), share.tally
    waiting = [one for one in flow.waiters() if share in one.share.lineage()]
    return PoolStats(
        name=share.name, device=flow.pool.device.name, limit=limit, pressure=Pressure.of(counts.live / limit),
        allocated_bytes=counts.live, active_bytes=counts.requested, peak_allocated=counts.peak,
        num_allocations=counts.allocations, num_frees=counts.frees,
        active_buffers=counts.allocations - counts.frees, hits_stream=counts.stream_hits,
        hits_shared=counts.shared_hits, hits_mapped=max(0, counts.placed - tally.misses),
        num_cache_misses=tally.misses, waiting=len(waiting), waiting_bytes=sum(one.nbytes for one in waiting),
        waits=tally.waits, wait_seconds=tally.wait_seconds, longest_wait=tally.longest_wait,
        handed_back=tally.handed_back, timeouts=tally.timeouts, cancellations=tally.cancellations,
        deadlocks=tally.deadlocks, bypassed_bytes=share.queue.overtaken if share.may_wait else 0,
        reserved_bytes=limit if not share.may_wait else 0,
        largest_hole=0 if share.may_wait else flow.core.largest(share._arena),
    )  # fmt: skip


def waiter_infos(share: Share) -> tuple[WaiterInfo, ...]:
    """Answer who waits in a share and in its parts, in the order of arrival."""
    flow = share.flow
    with flow.turn:
        waiting = [one for one in flow.waiters() if share in one.share.lineage()]
        return tuple(
            WaiterInfo(
                owner=label(one.owner),
                nbytes=one.nbytes,
                age=one.age,
                held=share.holdings.of(one.owner),
                tag=one.tag,
                priority=one.priority,
                remaining=one.remaining,
            )
            for one in sorted(waiting, key=lambda one: one.since)
        )


def out_of_memory_facts(flow: Flow, waiting: Waiting) -> OutOfMemoryFacts:
    """Answer all that is known at the moment when a request is about to be refused."""
    core, share = flow.core, waiting.share
    counts = core.counts()
    holders = held_by_tag(core, _TOP) or sorted(core.tag_bytes().items(), key=lambda one: -one[1])[:_TOP]
    rungs = {rung: count for rung, count in flow.tally.rungs.items() if count}
    reserved, live = counts.reserved, counts.live
    if not share.may_wait:  # a lease has a range of its own
        reserved, live = share.own_limit(), core.account(share._account).live
    return OutOfMemoryFacts(
        asked=waiting.nbytes, device=flow.pool.device.name, limit=share.capacity(), reserved=reserved,
        live=live, free=reserved - live,
        largest_hole=largest_hole(core) if share.may_wait else core.largest(share._arena),
        pending_fence_bytes=core.pending(), waiting=len(flow.queue), waiting_bytes=flow.queue.bytes,
        device_free=flow.supply.memory.free,
        holders=tuple(holders), sites=tuple(held_by_site(core, _TOP)), rungs=rungs, cause=_cause(flow, waiting),
        advice=tuple(_advice(flow, waiting, counts.reserved - counts.live)),
    )  # fmt: skip


def _cause(flow: Flow, waiting: Waiting) -> str:
    core = flow.core
    if waiting.total > waiting.share.capacity():
        return "size"
    if not waiting.share.may_wait or core.reserved() - core.live() >= waiting.total:
        return "fragmentation"
    return "limit" if core.live() + waiting.total > flow.supply.limit else "device"


def _advice(flow: Flow, waiting: Waiting, free: int) -> list[str]:
    limit = waiting.share.capacity()
    if not waiting.share.may_wait:
        return ["free what the lease served", "lease more"]
    if waiting.total > limit:
        return [f"ask for at most {format_size(limit)}", "raise the limit"]
    if free >= waiting.total:
        return ["the free memory is in pieces: allocate long-lived buffers first", "a larger segment_size"]
    supply = flow.supply
    if flow.core.live() == 0:
        kept = f"; {format_size(supply.min_free)} stay free for others (min_free)" if supply.min_free else ""
        return [f"other programs or other pools hold the device's memory{kept}", "a smaller limit here"]
    return ["await allocate_async, which waits for memory", "free buffers earlier", "raise the limit"]


def summary(stats: PoolStats) -> str:
    """Lay the figures of a pool out on one screen."""
    live = f"{format_size(stats.allocated_bytes)} in {format_count(stats.active_buffers, 'buffer')}"
    reserved = f"{format_size(stats.reserved_bytes)} in {format_count(stats.segments, 'segment')}"
    waits = f"{format_count(stats.waits, 'wait')} so far, the longest {format_duration(stats.longest_wait)}"
    rows = [
        ("pool", f"{stats.name} on {stats.device}"),
        ("live", f"{live} (peak {format_size(stats.peak_allocated)})"),
        ("reserved", f"{reserved} (peak {format_size(stats.peak_reserved)}, limit {format_size(stats.limit or 0)})"),
        ("pressure", stats.pressure.name),
        ("hits", f"{format_share(stats.cache_hit_rate)} of {format_count(stats.num_allocations, 'allocation')}"),
        ("waiting", f"{stats.waiting} for {format_size(stats.waiting_bytes)} ({waits})"),
        ("fragmentation", format_share(stats.fragmentation)),
    ]
    if stats.spills or stats.spilled_bytes:
        moved = f"{format_count(stats.spills, 'buffer')} so far, {stats.returns} came back"
        rows.append(("spilled", f"{format_size(stats.spilled_bytes)} ({moved})"))
    return "\n".join(f"{name:<14} {text}" for name, text in rows)
