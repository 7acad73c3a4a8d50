"""The commands that print what a recording comes to: each prints the function of its name in `insight.reports`."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Final, TypeVar

import click
from rich.console import Console
from rich.table import Table as Grid
from rich.text import Text
from rich.tree import Tree as Branch

from asyncmem.cli.parameters import json_option
from asyncmem.cli.recordings import at_option, file_argument, print_figures, within
from asyncmem.cli.tables import add, columns, output, show, show_table
from asyncmem.figures import format_count, format_duration, format_share, format_size
from asyncmem.insight import reports
from asyncmem.insight.groups import COLUMNS
from asyncmem.insight.reports import (
    Leak,
    Leaks,
    Moment,
    Node,
    Segment,
    Segments,
    Stats,
    Table,
    Timeline,
    Tree,
    WaitingLine,
    Waits,
)
from asyncmem.insight.reports import Row as TableRow
from asyncmem.insight.reports.summary import summarize

Row = TypeVar("Row")

top_option = click.option(
    "--top", type=click.IntRange(min=1), default=30, show_default=True, help="How many lines are printed."
)


def _show_first(rows: Sequence[Row], top: int, table: Grid, cells: Callable[[Row], Sequence[str]]) -> None:
    """Print the first rows in a table, and how many more there are."""
    console = output()
    for row in rows[:top]:
        add(table, *cells(row))
    show_table(table, console)
    if len(rows) > top:
        console.print(f"and {len(rows) - top:,} more: --top shows them")


@click.command()
@file_argument
@json_option
def summary(file: str, *, as_json: bool) -> None:
    """Print a recording's summary, on one screen.

    The most that was live and what held it, what served the allocations, what waited, what was never freed: the same
    as `memory_summary()` of a block.
    """
    print_figures(file, reports.summary if as_json else summarize, _show_summary, as_json=as_json)


def _show_summary(text: object, console: Console) -> None:
    console.print(str(text), soft_wrap=True)


# -- stats -------------------------------------------------------------------------------------------------------------

_LINES: Final = 10
_BAR: Final = 30


@click.command()
@file_argument
@json_option
def stats(file: str, *, as_json: bool) -> None:
    """Print statistics of the allocations: sizes, lifetimes, and the lines that allocate most.

    Below that stands what would help: sizes and counts for a pool's warm-up, and what is wrong.
    """
    print_figures(file, reports.stats, _show_stats, as_json=as_json)


def _show_stats(found: Stats, console: Console) -> None:
    sizes = [format_size(one) for one in (found.smallest, found.median, found.largest)]
    console.print(
        f"{format_size(found.allocated)} in {format_count(found.allocations, 'allocation')}: "
        f"the smallest {sizes[0]}, half of them up to {sizes[1]}, the largest {sizes[2]}"
    )
    by_size = [
        ((format_size(one.below), f"{one.allocations:,}", format_size(one.nbytes)), one.allocations)
        for one in found.sizes
    ]
    _show_bars("sizes", ("below", "allocations", "bytes"), by_size, console)
    by_time = [((format_duration(one.below), f"{one.buffers:,}"), one.buffers) for one in found.lifetimes]
    _show_bars("lifetimes", ("held below", "buffers"), by_time, console)
    table = columns("bytes", "share", "allocations", "line", left=["line"])
    for line in found.lines[:_LINES]:
        share = format_share(line.nbytes / found.allocated if found.allocated else 0)
        add(table, format_size(line.nbytes), share, f"{line.allocations:,}", line.name)
    console.print("\nlines that allocate most")
    show_table(table, console)
    console.print(f"\n{found.patterns}", soft_wrap=True)


def _show_bars(
    title: str, headings: tuple[str, ...], rows: Sequence[tuple[tuple[str, ...], int]], console: Console
) -> None:
    table = columns(*headings, "")
    table.columns[-1].justify = "left"
    most = max((number for _, number in rows), default=1)
    for cells, number in rows:
        add(table, *cells, "█" * max(round(number / most * _BAR), 1))
    console.print(f"\n{title}")
    show_table(table, console)


# -- table, waits, leaks: by line --------------------------------------------------------------------------------------


@click.command()
@file_argument
@click.option(
    "--by", type=click.Choice(COLUMNS), default="site", show_default=True, help="What is added up; a site is a line."
)
@top_option
@json_option
def table(file: str, by: str, top: int, *, as_json: bool) -> None:
    """Print a table of what allocates: each line, tag, task, thread, pool or size with its figures.

    What held most at the peak comes first. JSON has all rows.
    """
    print_figures(file, partial(reports.table, by=by), partial(_show_table, top), as_json=as_json)


def _show_table(top: int, found: Table, _: Console) -> None:
    name = {"site": "line", "nbytes": "size"}.get(found.by, found.by)
    headings = ("at the peak", "at the end", "allocations", "bytes", "held", "waited", name)

    def cells(row: TableRow) -> Sequence[str]:
        return (
            format_size(row.at_peak),
            format_size(row.at_end),
            f"{row.allocations:,}",
            format_size(row.allocated),
            format_duration(row.mean_lifetime),
            format_duration(row.waited),
            format_size(int(row.name)) if found.by == "nbytes" else row.name,
        )

    _show_first(found.rows, top, columns(*headings, left=[name]), cells)


@click.command()
@file_argument
@top_option
@json_option
def waits(file: str, top: int, *, as_json: bool) -> None:
    """Print the seconds that requests waited for memory, by the lines that made them.

    JSON has all lines.
    """
    print_figures(file, reports.waits, partial(_show_waits, top), as_json=as_json)


def _show_waits(top: int, found: Waits, console: Console) -> None:
    if not found.waits:
        console.print("No request waited.")
        return
    console.print(f"{format_duration(found.seconds)} in {format_count(found.waits, 'wait')}")
    table = columns("waited", "waits", "longest", "given up", "line", left=["line"])
    _show_first(found.lines, top, table, _waiting_cells)


def _waiting_cells(row: WaitingLine) -> Sequence[str]:
    return format_duration(row.seconds), f"{row.waits:,}", format_duration(row.longest), f"{row.given_up:,}", row.name


@click.command()
@file_argument
@click.option("--fail", is_flag=True, help="Exit with 1 if there is one.")
@top_option
@json_option
def leaks(file: str, top: int, *, fail: bool, as_json: bool) -> None:
    """Print what was allocated and never freed: file, line, how much, and how old it is.

    Buffers that a program keeps in its globals until it ends are among it. JSON has all lines.
    """
    found = print_figures(file, reports.leaks, partial(_show_leaks, top), as_json=as_json)
    if fail and found.buffers:
        raise click.exceptions.Exit(1)


def _show_leaks(top: int, found: Leaks, console: Console) -> None:
    if not found.known:
        console.print("What was never freed is not known: the end of the records is missing.")
        return
    if not found.buffers:
        console.print("All that was allocated was freed.")
        return
    console.print(f"{format_size(found.nbytes)} in {format_count(found.buffers, 'buffer')} never freed")
    if found.outlived:
        console.print(f"{format_count(found.outlived, 'buffer')} outlived the pool")
    table = columns("bytes", "buffers", "oldest", "tags", "line", left=["tags", "line"])
    _show_first(found.lines, top, table, _leak_cells)


def _leak_cells(row: Leak) -> Sequence[str]:
    line = f"{row.file}:{row.line} ({row.function})" if row.file else "?"
    return format_size(row.nbytes), f"{row.buffers:,}", format_duration(row.age), ", ".join(row.tags), line


# -- tree --------------------------------------------------------------------------------------------------------------

_LEAST: Final = 0.01
"""The share of all bytes below which a line is not shown by itself."""


@click.command()
@file_argument
@at_option
@click.option("--all", "whole", is_flag=True, help="Show lines of less than 1% too.")
@json_option
def tree(file: str, time: float | None, *, whole: bool, as_json: bool) -> None:
    """Print what was live at the peak as a tree of the lines that called for it.

    It is as deep as there are lines in the recording: `asyncmem run --frames`. JSON has all of it.
    """

    def show_tree(found: Tree, console: Console) -> None:
        root = Branch(Text(f"{format_size(found.nbytes)} live after {format_duration(found.time)}"), guide_style="")
        _grow(root, found.calls, found.nbytes, 0.0 if whole else _LEAST)
        show(root, console)

    print_figures(
        file, lambda records: reports.tree(records, within(records, time, "--at")), show_tree, as_json=as_json
    )


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

_MARGIN: Final = 12
_HEIGHT: Final = 12
_MOMENTS: Final = 100
"""Into how many parts the time is divided without a terminal."""
_EIGHTHS: Final = " ▁▂▃▄▅▆▇█"


@click.command()
@file_argument
@click.option("--moments", type=click.IntRange(1, 100_000), help="Into how many parts the time is divided.")
@json_option
def timeline(file: str, moments: int | None, *, as_json: bool) -> None:
    """Draw what was live over time, and what was reserved.

    Blocks are what was live, the line above them is what was reserved. Marks below: `w` where requests had waited, `!`
    where some were refused.
    """
    console = output()
    wide = max(console.width - _MARGIN, 10) if console.is_terminal and not as_json else _MOMENTS
    print_figures(file, partial(reports.timeline, moments=moments or wide), _show_timeline, as_json=as_json)


def _show_timeline(found: Timeline, console: Console) -> None:
    for line in _drawn(found):
        console.print(line, no_wrap=True, overflow="ignore", crop=False)


def _drawn(found: Timeline) -> Iterator[str]:
    top = max(1, *(max(one.live, one.reserved) for one in found.moments))
    for row in reversed(range(_HEIGHT)):
        label = format_size(round(top * (row + 1) / _HEIGHT)) if row % 3 == 2 else ""
        yield f"{label:>{_MARGIN - 2}} ┤{''.join(_cell(one, row, top) for one in found.moments)}".rstrip()
    yield f"{'':>{_MARGIN - 2}} └{'─' * len(found.moments)}"
    marks = "".join("!" if one.out_of_memory else "w" if one.waits else " " for one in found.moments)
    if marks.strip():
        yield " " * _MARGIN + marks.rstrip()
    end = format_duration(found.seconds)
    yield " " * _MARGIN + "0 s" + end.rjust(len(found.moments) - 3)


def _cell(moment: Moment, row: int, top: int) -> str:
    filled = min(max(-(-moment.live * _HEIGHT * 8 // top) - row * 8, 0), 8)
    if filled == 0 and moment.reserved and (moment.reserved * _HEIGHT - 1) // top == row:
        return "─"
    return _EIGHTHS[filled]


# -- segments ----------------------------------------------------------------------------------------------------------

_CELLS: Final = 48


@click.command()
@file_argument
@at_option
@json_option
def segments(file: str, time: float | None, *, as_json: bool) -> None:
    """Print the segments of the pools at the peak, each with a map of what lay in it.

    In a map a full block is in use, a light one in part, and a point is a hole. Memory by pages has no segments.
    """
    print_figures(
        file, lambda records: reports.segments(records, within(records, time, "--at")), _show_segments, as_json=as_json
    )


def _show_segments(found: Segments, console: Console) -> None:
    if not found.segments:
        console.print(f"No segments are in the records after {format_duration(found.time)}.")
        return
    table = columns("pool", "address", "size", "since", "held", "largest hole", "map", left=["pool"])
    table.columns[-1].justify = "left"
    for one in found.segments:
        add(
            table,
            one.pool,
            f"{one.address:#x}",
            format_size(one.nbytes),
            format_duration(one.since),
            format_share(one.live / one.nbytes),
            format_size(one.largest_hole),
            _map(one),
        )
    show_table(table, console)


def _map(segment: Segment) -> str:
    held = [0.0] * _CELLS
    for piece in segment.pieces:
        first, last = (at * _CELLS / segment.nbytes for at in (piece.offset, piece.offset + piece.nbytes))
        for cell in range(int(first), min(int(last) + 1, _CELLS)):
            held[cell] += max(min(last, cell + 1) - max(first, cell), 0.0)
    return "".join("█" if share > 0.99 else "░" if share else "·" for share in held)
