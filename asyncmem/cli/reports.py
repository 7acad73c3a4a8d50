"""The commands that print what a recording comes to: each prints the function of its name in `insight.reports`."""

from collections.abc import Callable, Sequence
from functools import partial, wraps
from inspect import signature
from typing import Any, Final

import click
from rich.console import Console
from rich.text import Text
from rich.tree import Tree as Branch

from asyncmem.cli.parameters import at_option, files_argument, json_option, print_figures, within
from asyncmem.cli.tables import Cell, output, show, show_table, table_of
from asyncmem.figures import format_count, format_duration, format_share, format_size
from asyncmem.insight import reports
from asyncmem.insight.groups import COLUMNS
from asyncmem.insight.reports import Leaks, Node, Segments, Stats, Table, Timeline, Tree, Waits
from asyncmem.insight.reports.segments import map_of
from asyncmem.insight.reports.summary import summarize
from asyncmem.insight.reports.timeline import MARGIN, drawn

Option = Callable[[Callable[..., object]], Callable[..., object]]

top_option = click.option(
    "--top", type=click.IntRange(min=1), default=30, show_default=True, help="How many lines are printed."
)


def _report(compute: Callable[..., object], *options: Option) -> Callable[[Callable[..., None]], click.Command]:
    """Make a command of the function that prints a recording's figures; with --json they are printed as such.

    The function has the command's name and its help. It is given the figures, the console, and the options that are no
    parameters of `compute`.
    """

    def command_of(show_figures: Callable[..., None]) -> click.Command:
        @wraps(show_figures)
        def command(files: Sequence[str], *, as_json: bool, **given: Any) -> None:  # noqa: ANN401 -- click's, passed on
            asked = {name: given.pop(name) for name in list(given) if name in signature(compute).parameters}
            print_figures(files, partial(compute, **asked), partial(show_figures, **given), as_json=as_json)

        made: Callable[..., object] = json_option(command)
        for option in reversed(options):
            made = option(made)
        return click.command()(files_argument(made))

    return command_of


def _show_first(
    headings: Sequence[str], rows: Sequence[Sequence[Cell]], top: int, left: Sequence[str], console: Console
) -> None:
    """Print the first rows in a table, and how many more there are."""
    show_table(table_of(headings, rows[:top], left=left), console)
    if len(rows) > top:
        console.print(f"and {len(rows) - top:,} more: --top shows them")


@click.command()
@files_argument
@json_option
def summary(files: Sequence[str], *, as_json: bool) -> None:
    """Print a recording's summary, on one screen.

    The most that was live and what held it, what served the allocations, what waited, what was never freed: the same
    as `memory_summary()` of a block.
    """
    compute: Callable[..., object] = reports.summary if as_json else summarize
    print_figures(files, compute, lambda text, console: console.print(str(text), soft_wrap=True), as_json=as_json)


# -- stats -------------------------------------------------------------------------------------------------------------

_LINES: Final = 10
_BAR: Final = 30


@_report(reports.stats)
def stats(found: Stats, console: Console) -> None:
    """Print statistics of the allocations: sizes, lifetimes, and the lines that allocate most.

    Below that stands what would help: sizes and counts for a pool's warm-up, and what is wrong.
    """
    sizes = [format_size(one) for one in (found.smallest, found.median, found.largest)]
    console.print(
        f"{format_size(found.allocated)} in {format_count(found.allocations, 'allocation')}: "
        f"the smallest {sizes[0]}, half of them up to {sizes[1]}, the largest {sizes[2]}"
    )
    by_size = [(format_size(one.below), one.allocations, format_size(one.nbytes)) for one in found.sizes]
    by_time = [(format_duration(one.below), one.buffers) for one in found.lifetimes]
    _show_bars("sizes", ("below", "allocations", "bytes"), by_size, console)
    _show_bars("lifetimes", ("held below", "buffers"), by_time, console)
    lines = [
        (format_size(one.nbytes), format_share(one.nbytes / max(found.allocated, 1)), one.allocations, one.name)
        for one in found.lines[:_LINES]
    ]
    console.print("\nlines that allocate most")
    show_table(table_of(("bytes", "share", "allocations", "line"), lines, left=["line"]), console)
    console.print(f"\n{found.patterns}", soft_wrap=True)


def _show_bars(
    title: str, headings: Sequence[str], rows: Sequence[tuple[str, int, *tuple[str, ...]]], console: Console
) -> None:
    most = max((row[1] for row in rows), default=1)
    bars = [(*row, "█" * max(round(row[1] / most * _BAR), 1)) for row in rows]
    console.print(f"\n{title}")
    show_table(table_of((*headings, ""), bars, whole=[""]), console)


# -- table, waits, leaks: by line --------------------------------------------------------------------------------------

by_option = click.option(
    "--by", type=click.Choice(COLUMNS), default="site", show_default=True, help="What is added up; a site is a line."
)


@_report(reports.table, by_option, top_option)
def table(found: Table, console: Console, top: int) -> None:
    """Print a table of what allocates: each line, tag, task, thread, pool or size with its figures.

    What held most at the peak comes first. JSON has all rows.
    """
    name = {"site": "line", "nbytes": "size"}.get(found.by, found.by)
    headings = ("at the peak", "at the end", "allocations", "bytes", "held", "waited", name)
    rows = [
        (
            format_size(row.at_peak), format_size(row.at_end), row.allocations, format_size(row.allocated),
            format_duration(row.mean_lifetime), format_duration(row.waited),
            format_size(int(row.name)) if found.by == "nbytes" else row.name,
        )
        for row in found.rows
    ]  # fmt: skip
    _show_first(headings, rows, top, [name], console)


@_report(reports.waits, top_option)
def waits(found: Waits, console: Console, top: int) -> None:
    """Print the seconds that requests waited for memory, by the lines that made them.

    JSON has all lines.
    """
    if not found.waits:
        console.print("No request waited.")
        return
    console.print(f"{format_duration(found.seconds)} in {format_count(found.waits, 'wait')}")
    rows = [
        (format_duration(row.seconds), row.waits, format_duration(row.longest), row.given_up, row.name)
        for row in found.lines
    ]
    _show_first(("waited", "waits", "longest", "given up", "line"), rows, top, ["line"], console)


@click.command()
@files_argument
@click.option("--fail", is_flag=True, help="Exit with 1 if there is one.")
@top_option
@json_option
def leaks(files: Sequence[str], top: int, *, fail: bool, as_json: bool) -> None:
    """Print what was allocated and never freed: file, line, how much, and how old it is.

    Buffers that a program keeps in its globals until it ends are among it. JSON has all lines.
    """
    found = print_figures(files, reports.leaks, partial(_show_leaks, top=top), as_json=as_json)
    if fail and found.buffers:
        raise click.exceptions.Exit(1)


def _show_leaks(found: Leaks, console: Console, top: int) -> None:
    if not found.known:
        console.print("What was never freed is not known: the end of the records is missing.")
        return
    if not found.buffers:
        console.print("All that was allocated was freed.")
        return
    console.print(f"{format_size(found.nbytes)} in {format_count(found.buffers, 'buffer')} never freed")
    if found.outlived:
        console.print(f"{format_count(found.outlived, 'buffer')} outlived the pool")
    rows = [
        (
            format_size(row.nbytes), row.buffers, format_duration(row.age), ", ".join(row.tags),
            f"{row.file}:{row.line} ({row.function})" if row.file else "?",
        )
        for row in found.lines
    ]  # fmt: skip
    _show_first(("bytes", "buffers", "oldest", "tags", "line"), rows, top, ["tags", "line"], console)


# -- tree --------------------------------------------------------------------------------------------------------------

_LEAST: Final = 0.01
"""The share of all bytes below which a line is not shown by itself."""

all_option = click.option("--all", "whole", is_flag=True, help="Show lines of less than 1% too.")


@_report(lambda records, time: reports.tree(records, within(records, time, "--at")), at_option, all_option)
def tree(found: Tree, console: Console, *, whole: bool) -> None:
    """Print what was live at the peak as a tree of the lines that called for it.

    It is as deep as there are lines in the recording: `asyncmem run --frames`. JSON has all of it.
    """
    root = Branch(Text(f"{format_size(found.nbytes)} live after {format_duration(found.time)}"), guide_style="")
    _grow(root, found.calls, found.nbytes, 0.0 if whole else _LEAST)
    show(root, console)


def _grow(branch: Branch, calls: Sequence[Node], whole: int, least: float) -> None:
    small = [node for node in calls if node.nbytes < whole * least]
    for node in calls[: len(calls) - len(small)]:
        share = format_share(node.nbytes / whole if whole else 0)
        label = f"{format_size(node.nbytes)} ({share}, {format_count(node.buffers, 'buffer')})  {node.name}"
        _grow(branch.add(Text(label)), node.calls, whole, least)
    if small:
        nbytes = sum(node.nbytes for node in small)
        branch.add(Text(f"{format_size(nbytes)}  {format_count(len(small), 'smaller line')}"))


# -- timeline ----------------------------------------------------------------------------------------------------------

_MOMENTS: Final = 100
"""Into how many parts the time is divided without a terminal."""

moments_option = click.option(
    "--moments", type=click.IntRange(1, 100_000), help="Into how many parts the time is divided."
)


def _as_wide_as_the_screen() -> int:
    console = output()
    return max(console.width - MARGIN, 10) if console.is_terminal else _MOMENTS


@_report(lambda records, moments: reports.timeline(records, moments or _as_wide_as_the_screen()), moments_option)
def timeline(found: Timeline, console: Console) -> None:
    """Draw what was live over time, and what was reserved.

    Blocks are what was live, the line above them is what was reserved. Marks below: `w` where requests had waited, `!`
    where some were refused.
    """
    for line in drawn(found):
        console.print(line, no_wrap=True, overflow="ignore", crop=False)


# -- segments ----------------------------------------------------------------------------------------------------------


@_report(lambda records, time: reports.segments(records, within(records, time, "--at")), at_option)
def segments(found: Segments, console: Console) -> None:
    """Print the segments of the pools at the peak, each with a map of what lay in it.

    In a map a full block is in use, a light one in part, and a point is a hole. Memory by pages has no segments.
    """
    if not found.segments:
        console.print(f"No segments are in the records after {format_duration(found.time)}.")
        return
    headings = ("pool", "address", "size", "since", "held", "largest hole", "map")
    rows = [
        (
            one.pool, f"{one.address:#x}", format_size(one.nbytes), format_duration(one.since),
            format_share(one.live / one.nbytes), format_size(one.largest_hole), map_of(one),
        )
        for one in found.segments
    ]  # fmt: skip
    show_table(table_of(headings, rows, left=["pool"], whole=["map"]), console)
