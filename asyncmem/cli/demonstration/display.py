"""Shows a run while it goes on: a few lines redrawn on a terminal, a line a second elsewhere."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table

from asyncmem.cli.demonstration.pipeline import Progress, Show
from asyncmem.cli.demonstration.plan import Plan
from asyncmem.figures import format_duration, format_size
from asyncmem.stats import Pressure

_COLOURS = {Pressure.LOW: "green", Pressure.MEDIUM: "cyan", Pressure.HIGH: "yellow", Pressure.CRITICAL: "red"}

PLAIN_SECONDS: float = 1.0


@contextmanager
def display(console: Console, plan: Plan) -> Iterator[Show]:
    """Give what shows a run's progress on this console; the terminal is left clean whatever ends the block."""
    if not console.is_terminal:
        yield _PlainLines(console, plan)
        return
    # No refreshing thread: it would compete with the pipeline, and what it costs could not be left out.
    with Live(console=console, auto_refresh=False, transient=True) as live:
        yield lambda progress: live.update(_picture(progress, plan), refresh=True)


def _picture(progress: Progress, plan: Plan) -> Table:
    stats = progress.stats
    table = Table.grid(padding=(0, 2))
    table.add_row(
        "in use", ProgressBar(total=plan.limit, completed=stats.allocated_bytes, width=40), _in_use(progress, plan)
    )
    table.add_row("pressure", f"[{_COLOURS[stats.pressure]}]{stats.pressure.name}[/]", "")
    table.add_row("waiting", f"{stats.waiting:,} requests for {format_size(stats.waiting_bytes)}", "")
    table.add_row("waits", f"{stats.waits:,} so far, the longest {format_duration(stats.longest_wait)}", "")
    table.add_row("items", f"{progress.items:,} done, {progress.items_per_s:,.0f} a second", "")
    return table


def _in_use(progress: Progress, plan: Plan) -> str:
    return f"{format_size(progress.stats.allocated_bytes)} of {format_size(plan.limit)}"


class _PlainLines:
    """A line a second, for logs and pipes."""

    def __init__(self, console: Console, plan: Plan) -> None:
        self._console = console
        self._plan = plan
        self._next = time.monotonic() + PLAIN_SECONDS

    def __call__(self, progress: Progress) -> None:
        if time.monotonic() < self._next:
            return
        self._next += PLAIN_SECONDS
        stats = progress.stats
        self._console.print(
            f"{progress.seconds:.1f} s: {_in_use(progress, self._plan)} in use, pressure {stats.pressure.name}, "
            f"{stats.waiting:,} waiting, {stats.waits:,} waits, {progress.items_per_s:,.0f} items/s",
            soft_wrap=True,
        )
