"""`asyncmem summary`: one screen about a recording."""

import click
from rich.console import Console

from asyncmem.cli.reports.telling import file_argument, json_option, load, tell
from asyncmem.insight import reports
from asyncmem.insight.summary import summarize


@click.command()
@file_argument
@json_option
def summary(file: str, *, as_json: bool) -> None:
    """Say what a recording comes to, on one screen.

    How much was live at most and whose that was, what served the allocations, who waited, what was never freed: what
    `memory_summary()` says of a block.
    """
    records = load(file)

    def show(_: object, console: Console) -> None:
        console.print(summarize(records), soft_wrap=True)

    tell(records, reports.summary(records) if as_json else None, show, as_json=as_json)
