"""`asyncmem demo`: a pipeline that wants several times the memory there is, and waits instead of failing."""

import functools
from collections.abc import Iterator
from contextlib import closing, contextmanager

import click
from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

import asyncmem
from asyncmem.cli.demo_pipeline import Plan, Report, Show, open_device, run
from asyncmem.cli.parameters import SIZE, json_option
from asyncmem.cli.tables import COLOURS, output, show_table, table_of
from asyncmem.figures import format_duration, format_share, format_size
from asyncmem.text import to_json


@click.command()
@click.option("--device", "name", default="host", show_default=True, help='Where to run: "host" or "simulated".')
@click.option("--limit", type=SIZE, default="32 MiB", show_default=True, help="What the pool may reserve.")
@click.option(
    "--seconds", type=click.FloatRange(min=0.1, max=3600), default=5.0, show_default=True, help="How long to run."
)
@json_option
def demo(name: str, limit: int, seconds: float, as_json: bool) -> None:
    """Run a pipeline of three stages in far less memory than it wants.

    Items are decoded, transformed and reduced, each stage on a stream of its own; on the host this is real numpy work.
    So many items are in flight that together they would need five times the limit. Those that find no memory wait. The
    report says how often and how long, what the pool reserved at most, how long the event loop was ever blocked, and
    whether every result is right. Exits with 1 if any of that went wrong.
    """
    plan = Plan.for_limit(limit, seconds)
    console = Console(quiet=True) if as_json else output()
    with closing(open_device(name)) as device:
        console.print(
            f"decode, transform, reduce on {device.name}: {plan.in_flight} items at once want "
            f"{format_size(plan.demand)}, the limit is {format_size(plan.limit)}",
            soft_wrap=True,
        )
        with _display(console) as show:
            report = asyncmem.run(functools.partial(run, device, plan, show))
    if as_json:
        click.echo(to_json(figures_of(report), indent=2))
    else:
        show_table(as_table(report), console)
    problems = list(shortcomings(report))
    for problem in problems:
        click.echo(f"not as it should be: {problem}", err=True)
    if problems:
        raise click.exceptions.Exit(1)


# -- while it runs -----------------------------------------------------------------------------------------------------


@contextmanager
def _display(console: Console) -> Iterator[Show]:
    """Give a function that shows the progress: redrawn on a terminal, a line a second elsewhere."""
    if not console.is_terminal:
        yield _line_a_second(console)
        return
    # No refreshing thread: it would compete with the pipeline, and what it costs could not be left out.
    with Live(console=console, auto_refresh=False, transient=True) as live:
        yield lambda report: live.update(_picture(report), refresh=True)


def _picture(report: Report) -> Table:
    stats = report.stats
    bar = ProgressBar(total=report.plan.limit, completed=stats.allocated_bytes, width=40)
    table = Table.grid(padding=(0, 2))
    table.add_row("in use", bar, _in_use(report))
    table.add_row("pressure", Text(stats.pressure.name, style=COLOURS[stats.pressure.name]))
    table.add_row("waiting", f"{stats.waiting:,} requests for {format_size(stats.waiting_bytes)}")
    table.add_row("waits", f"{stats.waits:,} so far, the longest {format_duration(stats.longest_wait)}")
    table.add_row("items", f"{report.items:,} done, {report.items_per_s:,.0f} a second")
    return table


def _in_use(report: Report) -> str:
    return f"{format_size(report.stats.allocated_bytes)} of {format_size(report.plan.limit)}"


def _line_a_second(console: Console) -> Show:
    due = 1.0

    def show(report: Report) -> None:
        nonlocal due
        if report.seconds < due:
            return
        due += 1.0
        stats = report.stats
        console.print(
            f"{report.seconds:.1f} s: {_in_use(report)} in use, pressure {stats.pressure.name}, "
            f"{stats.waiting:,} waiting, {stats.waits:,} waits, {report.items_per_s:,.0f} items/s",
            soft_wrap=True,
        )

    return show


# -- at the end --------------------------------------------------------------------------------------------------------


def shortcomings(report: Report) -> Iterator[str]:
    """Return a sentence for each promise of the demonstration that the run did not keep."""
    stats = report.stats
    if report.items == 0:
        yield "no item was finished"
    if report.wrong:
        yield f"{report.wrong:,} of {report.items:,} results differ from plain numpy"
    if stats.waits == 0:
        yield "no request ever waited"
    if stats.peak_reserved > report.plan.limit:
        peak, limit = format_size(stats.peak_reserved), format_size(report.plan.limit)
        yield f"the pool reserved {peak} under a limit of {limit}"
    if stats.allocated_bytes:
        yield f"{format_size(stats.allocated_bytes)} were still held at the end"


def figures_of(report: Report) -> dict[str, object]:
    """Return the figures by name, each with its unit in the name unless it is bytes or a count."""
    stats, plan = report.stats, report.plan
    return {
        "device": report.device,
        "seconds": round(report.seconds, 3),
        "items": report.items,
        "items_per_s": round(report.items_per_s, 2),
        "in_flight": plan.in_flight,
        "item_bytes": plan.item_bytes,
        "demand": plan.demand,
        "limit": plan.limit,
        "peak": stats.peak_reserved,
        "peak_allocated": stats.peak_allocated,
        "waits": stats.waits,
        "wait_s": round(stats.wait_seconds, 6),
        "longest_wait_s": round(stats.longest_wait, 6),
        "longest_stall_us": round(report.longest_stall * 1e6, 1),
        "stall_p99_us": round(report.stall_p99 * 1e6, 1),
        "cache_hit_rate": round(stats.cache_hit_rate, 4),
        "wrong": report.wrong,
        "checked": report.checks,
        "shortcomings": list(shortcomings(report)),
    }


def as_table(report: Report) -> Table:
    """Return the figures as a table."""
    stats, plan = report.stats, report.plan
    share = format_share(stats.peak_reserved / plan.limit)
    average = stats.wait_seconds / stats.waits if stats.waits else 0.0
    wrong = f"{report.wrong:,} wrong" if report.wrong else "all right"
    rows = {
        "wanted at once": f"{format_size(plan.demand)}, {plan.demand / plan.limit:.1f} times the limit",
        "peak": f"{format_size(stats.peak_reserved)} reserved of {format_size(plan.limit)} ({share})",
        "waits": f"{stats.waits:,}, {format_duration(average)} on average",
        "longest wait": format_duration(stats.longest_wait),
        "throughput": f"{report.items_per_s:,.0f} items/s, {report.items:,} in {report.seconds:.1f} s",
        "loop stalls": f"longest {format_duration(report.longest_stall)}, p99 {format_duration(report.stall_p99)}",
        "results": f"{wrong}; checked: {report.checks}",
    }
    return table_of(("name", "value"), list(rows.items()), left=("name", "value"), header=False)
