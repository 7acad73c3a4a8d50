"""`asyncmem waits`: seconds waited for memory, by the lines that asked."""

import click
from rich.console import Console

from asyncmem.cli.reports.telling import file_argument, json_option, load, tell, top_option
from asyncmem.cli.tables import add, columns, print_whole
from asyncmem.figures import format_count, format_duration
from asyncmem.insight import reports
from asyncmem.insight.reports import Waits


@click.command()
@file_argument
@top_option(30)
@json_option
def waits(file: str, top: int, *, as_json: bool) -> None:
    """Say who waited for memory, and for how long, by the lines that asked for it.

    Growth is waited for as well. JSON has all lines.
    """
    records = load(file)

    def show(found: Waits, console: Console) -> None:
        _show(found, top, console)

    tell(records, reports.waits(records), show, as_json=as_json)


def _show(found: Waits, top: int, console: Console) -> None:
    if not found.waits:
        console.print("Nobody waited.")
        return
    console.print(f"{format_duration(found.seconds)} in {format_count(found.waits, 'wait')}")
    table = columns("waited", "waits", "longest", "given up", "line", left=["line"])
    for one in found.lines[:top]:
        seconds, longest = format_duration(one.seconds), format_duration(one.longest)
        add(table, seconds, f"{one.waits:,}", longest, f"{one.given_up:,}", one.name)
    print_whole(table, console)
    if len(found.lines) > top:
        console.print(f"and {len(found.lines) - top:,} more: --top shows them")
