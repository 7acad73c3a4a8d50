"""`asyncmem table`: every line that allocates, with its figures."""

import click
from rich.console import Console

from asyncmem.cli.reports.telling import file_argument, json_option, load, tell, top_option
from asyncmem.cli.tables import add, columns, print_whole
from asyncmem.figures import format_duration, format_size
from asyncmem.insight import reports
from asyncmem.insight.groups import COLUMNS
from asyncmem.insight.reports import Table


@click.command()
@file_argument
@click.option(
    "--by", type=click.Choice(COLUMNS), default="site", show_default=True, help="What is added up; a site is a line."
)
@top_option(50)
@json_option
def table(file: str, by: str, top: int, *, as_json: bool) -> None:
    """List who allocates: each line, tag, task, thread, pool or size with its figures.

    What held most when the most was live comes first. JSON has all rows.
    """
    records = load(file)

    def show(found: Table, console: Console) -> None:
        _show(found, top, console)

    tell(records, reports.table(records, by), show, as_json=as_json)


def _show(found: Table, top: int, console: Console) -> None:
    name = {"site": "line", "nbytes": "size"}.get(found.by, found.by)
    cells = columns("at the peak", "at the end", "allocations", "bytes", "held", "waited", name, left=[name])
    for row in found.rows[:top]:
        add(
            cells,
            format_size(row.at_peak),
            format_size(row.at_end),
            f"{row.allocations:,}",
            format_size(row.allocated),
            format_duration(row.mean_lifetime),
            format_duration(row.waited),
            format_size(int(row.name)) if found.by == "nbytes" else row.name,
        )
    print_whole(cells, console)
    if len(found.rows) > top:
        console.print(f"and {len(found.rows) - top:,} more: --top shows them")
