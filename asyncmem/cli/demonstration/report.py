"""What a run has shown, as a table and as JSON, and whether that is what it was to show."""

from collections.abc import Iterator

from rich.table import Table

from asyncmem.cli.demonstration.pipeline import Outcome
from asyncmem.figures import format_duration, format_share, format_size


def shortcomings(outcome: Outcome) -> list[str]:
    """Say in words which promises of the demonstration the run did not keep; none is success."""
    return list(_shortcomings(outcome))


def _shortcomings(outcome: Outcome) -> Iterator[str]:
    progress, stats = outcome.progress, outcome.progress.stats
    if progress.items == 0:
        yield "no item was finished"
    if progress.wrong:
        yield f"{progress.wrong:,} of {progress.items:,} results differ from plain numpy"
    if stats.waits == 0:
        yield "no request ever waited"
    if stats.peak_reserved > outcome.plan.limit:
        peak, limit = format_size(stats.peak_reserved), format_size(outcome.plan.limit)
        yield f"the pool reserved {peak} under a limit of {limit}"
    if stats.allocated_bytes:
        yield f"{format_size(stats.allocated_bytes)} were still held at the end"


def as_json(outcome: Outcome) -> dict[str, object]:
    """Answer the figures by name, each with its unit in the name unless it is bytes or a count."""
    progress, stats, plan = outcome.progress, outcome.progress.stats, outcome.plan
    return {
        "device": outcome.device,
        "seconds": round(progress.seconds, 3),
        "items": progress.items,
        "items_per_s": round(progress.items_per_s, 2),
        "in_flight": plan.in_flight,
        "item_bytes": plan.item_bytes,
        "demand": plan.demand,
        "limit": plan.limit,
        "peak": stats.peak_reserved,
        "peak_allocated": stats.peak_allocated,
        "waits": stats.waits,
        "wait_s": round(stats.wait_seconds, 6),
        "longest_wait_s": round(stats.longest_wait, 6),
        "longest_stall_us": round(outcome.longest_stall * 1e6, 1),
        "stall_p99_us": round(outcome.stall_p99 * 1e6, 1),
        "cache_hit_rate": round(stats.cache_hit_rate, 4),
        "wrong": progress.wrong,
        "checked": outcome.checks,
        "shortcomings": shortcomings(outcome),
    }


def as_table(outcome: Outcome) -> Table:
    """Lay the figures out for a person."""
    progress, stats, plan = outcome.progress, outcome.progress.stats, outcome.plan
    share = format_share(stats.peak_reserved / plan.limit)
    average = stats.wait_seconds / stats.waits if stats.waits else 0.0
    wrong = f"{progress.wrong:,} wrong" if progress.wrong else "all right"
    table = Table(box=None, show_header=False, padding=(0, 2))
    table.add_row("wanted at once", f"{format_size(plan.demand)}, {plan.demand / plan.limit:.1f} times the limit")
    table.add_row("peak", f"{format_size(stats.peak_reserved)} reserved of {format_size(plan.limit)} ({share})")
    table.add_row("waits", f"{stats.waits:,}, {format_duration(average)} on average")
    table.add_row("longest wait", format_duration(stats.longest_wait))
    table.add_row("throughput", f"{progress.items_per_s:,.0f} items/s, {progress.items:,} in {progress.seconds:.1f} s")
    table.add_row(
        "loop stalls", f"longest {format_duration(outcome.longest_stall)}, p99 {format_duration(outcome.stall_p99)}"
    )
    table.add_row("results", f"{wrong}; checked: {outcome.checks}")
    return table
