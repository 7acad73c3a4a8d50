"""`asyncmem leaks`: what was never freed, and where it was allocated."""

import click
from rich.console import Console

from asyncmem.cli.reports.telling import file_argument, json_option, load, tell, top_option
from asyncmem.cli.tables import add, columns, print_whole
from asyncmem.figures import format_count, format_duration, format_size
from asyncmem.insight import reports
from asyncmem.insight.reports import Leak, Leaks


@click.command()
@file_argument
@click.option("--fail", is_flag=True, help="Exit with 1 where there is one.")
@top_option(30)
@json_option
def leaks(file: str, top: int, *, fail: bool, as_json: bool) -> None:
    """Name what was allocated and never freed: file, line, how much, and for how long it was held.

    What a program holds in its globals when it ends is among it. JSON has all lines.
    """
    records = load(file)
    found = reports.leaks(records)

    def show(found: Leaks, console: Console) -> None:
        _show(found, top, console)

    tell(records, found, show, as_json=as_json)
    if fail and found.buffers:
        raise click.exceptions.Exit(1)


def _show(found: Leaks, top: int, console: Console) -> None:
    if not found.buffers:
        console.print("All that was allocated was freed.")
        return
    console.print(f"{format_size(found.nbytes)} in {format_count(found.buffers, 'buffer')} never freed")
    table = columns("bytes", "buffers", "oldest", "tags", "line", left=["tags", "line"])
    for one in found.lines[:top]:
        age, tags = format_duration(one.age), ", ".join(one.tags)
        add(table, format_size(one.nbytes), f"{one.buffers:,}", age, tags, _place(one))
    print_whole(table, console)
    if len(found.lines) > top:
        console.print(f"and {len(found.lines) - top:,} more: --top shows them")


def _place(leak: Leak) -> str:
    return f"{leak.file}:{leak.line} ({leak.function})" if leak.file else "?"
