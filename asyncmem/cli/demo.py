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
from asyncmem.cli.demo_pipeline import Demonstration, Show, open_device
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
    console = Console(quiet=True) if as_json else output()
    with closing(open_device(name)) as device:
        one = Demonstration(device, limit, seconds)
        console.print(
            f"decode, transform, reduce on {device.name}: {one.in_flight} items at once want "
            f"{format_size(one.demand)}, the limit is {format_size(limit)}",
            soft_wrap=True,
        )
        with _display(console) as show:
            asyncmem.run(functools.partial(one.run, show))
    if as_json:
        click.echo(to_json(figures_of(one), indent=2))
    else:
        show_table(as_table(one), console)
    problems = list(shortcomings(one))
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
        yield lambda one: live.update(_picture(one), refresh=True)


def _picture(one: Demonstration) -> Table:
    stats = one.stats
    bar = ProgressBar(total=one.limit, completed=stats.allocated_bytes, width=40)
    table = Table.grid(padding=(0, 2))
    table.add_row("in use", bar, _in_use(one))
    table.add_row("pressure", Text(stats.pressure.name, style=COLOURS[stats.pressure.name]))
    table.add_row("waiting", f"{stats.waiting:,} requests for {format_size(stats.waiting_bytes)}")
    table.add_row("waits", f"{stats.waits:,} so far, the longest {format_duration(stats.longest_wait)}")
    table.add_row("items", f"{one.items:,} done, {one.items_per_s:,.0f} a second")
    return table


def _in_use(one: Demonstration) -> str:
    return f"{format_size(one.stats.allocated_bytes)} of {format_size(one.limit)}"


def _line_a_second(console: Console) -> Show:
    due = 1.0

    def show(one: Demonstration) -> None:
        nonlocal due
        if one.elapsed < due:
            return
        due += 1.0
        stats = one.stats
        console.print(
            f"{one.elapsed:.1f} s: {_in_use(one)} in use, pressure {stats.pressure.name}, "
            f"{stats.waiting:,} waiting, {stats.waits:,} waits, {one.items_per_s:,.0f} items/s",
            soft_wrap=True,
        )

    return show


# -- at the end --------------------------------------------------------------------------------------------------------


def shortcomings(one: Demonstration) -> Iterator[str]:
    """Return a sentence for each promise of the demonstration that the run did not keep."""
    stats = one.stats
    if one.items == 0:
        yield "no item was finished"
    if one.wrong:
        yield f"{one.wrong:,} of {one.items:,} results differ from plain numpy"
    if stats.waits == 0:
        yield "no request ever waited"
    if stats.peak_reserved > one.limit:
        peak, limit = format_size(stats.peak_reserved), format_size(one.limit)
        yield f"the pool reserved {peak} under a limit of {limit}"
    if stats.allocated_bytes:
        yield f"{format_size(stats.allocated_bytes)} were still held at the end"


def figures_of(one: Demonstration) -> dict[str, object]:
    """Return the figures by name, each with its unit in the name unless it is bytes or a count."""
    stats = one.stats
    return {
        "device": one.device.name,
        "seconds": round(one.elapsed, 3),
        "items": one.items,
        "items_per_s": round(one.items_per_s, 2),
        "in_flight": one.in_flight,
        "item_bytes": one.item_bytes,
        "demand": one.demand,
        "limit": one.limit,
        "peak": stats.peak_reserved,
        "peak_allocated": stats.peak_allocated,
        "waits": stats.waits,
        "wait_s": round(stats.wait_seconds, 6),
        "longest_wait_s": round(stats.longest_wait, 6),
        "longest_stall_us": round(one.longest_stall * 1e6, 1),
        "stall_p99_us": round(one.stall_p99 * 1e6, 1),
        "cache_hit_rate": round(stats.cache_hit_rate, 4),
        "wrong": one.wrong,
        "checked": one.checks,
        "shortcomings": list(shortcomings(one)),
    }


def as_table(one: Demonstration) -> Table:
    """Return the figures as a table."""
    stats = one.stats
    share = format_share(stats.peak_reserved / one.limit)
    average = stats.wait_seconds / stats.waits if stats.waits else 0.0
    wrong = f"{one.wrong:,} wrong" if one.wrong else "all right"
    rows = {
        "wanted at once": f"{format_size(one.demand)}, {one.demand / one.limit:.1f} times the limit",
        "peak": f"{format_size(stats.peak_reserved)} reserved of {format_size(one.limit)} ({share})",
        "waits": f"{stats.waits:,}, {format_duration(average)} on average",
        "longest wait": format_duration(stats.longest_wait),
        "throughput": f"{one.items_per_s:,.0f} items/s, {one.items:,} in {one.elapsed:.1f} s",
        "loop stalls": f"longest {format_duration(one.longest_stall)}, p99 {format_duration(one.stall_p99)}",
        "results": f"{wrong}; checked: {one.checks}",
    }
    return table_of(("name", "value"), list(rows.items()), left=("name", "value"), header=False)
