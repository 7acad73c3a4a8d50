"""`asyncmem stats`: what the allocations of a recording are like."""

import click
from rich.console import Console

from asyncmem.cli.reports.telling import file_argument, json_option, load, tell
from asyncmem.cli.tables import add, columns, print_whole
from asyncmem.figures import format_count, format_duration, format_share, format_size
from asyncmem.insight import reports
from asyncmem.insight.reports import Stats

_LINES = 10
_BAR = 30


@click.command()
@file_argument
@json_option
def stats(file: str, *, as_json: bool) -> None:
    """Say what the allocations are like: their sizes, how long they were held, which lines made them.

    Below that is what would help: sizes and counts for a pool's warm-up, and what is wrong.
    """
    records = load(file)
    tell(records, reports.stats(records), _show, as_json=as_json)


def _show(found: Stats, console: Console) -> None:
    sizes = [format_size(one) for one in (found.smallest, found.median, found.largest)]
    console.print(
        f"{format_size(found.allocated)} in {format_count(found.allocations, 'allocation')}: "
        f"the smallest {sizes[0]}, half of them up to {sizes[1]}, the largest {sizes[2]}"
    )
    _show_sizes(found, console)
    _show_lifetimes(found, console)
    _show_lines(found, console)
    console.print(f"\n{found.patterns}", soft_wrap=True)


def _show_sizes(found: Stats, console: Console) -> None:
    table = columns("below", "allocations", "bytes", "", left=[""])
    table.columns[-1].no_wrap = True
    most = max((one.allocations for one in found.sizes), default=1)
    for one in found.sizes:
        add(table, format_size(one.below), f"{one.allocations:,}", format_size(one.nbytes), _bar(one.allocations, most))
    console.print("\nsizes")
    print_whole(table, console)


def _show_lifetimes(found: Stats, console: Console) -> None:
    table = columns("held below", "buffers", "", left=[""])
    table.columns[-1].no_wrap = True
    most = max((one.buffers for one in found.lifetimes), default=1)
    for one in found.lifetimes:
        add(table, format_duration(one.below), f"{one.buffers:,}", _bar(one.buffers, most))
    console.print("\nlifetimes")
    print_whole(table, console)


def _show_lines(found: Stats, console: Console) -> None:
    table = columns("bytes", "share", "allocations", "line", left=["line"])
    for one in found.lines[:_LINES]:
        share = format_share(one.nbytes / found.allocated if found.allocated else 0)
        add(table, format_size(one.nbytes), share, f"{one.allocations:,}", one.name)
    console.print("\nlines that allocate most")
    print_whole(table, console)


def _bar(number: int, most: int) -> str:
    return "█" * max(round(number / most * _BAR), 1)
