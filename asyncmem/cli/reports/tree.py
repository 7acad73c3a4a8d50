"""`asyncmem tree`: whose memory it was, from the outermost line inwards."""

from collections.abc import Sequence

import click
from rich.console import Console
from rich.text import Text
from rich.tree import Tree as Branch

from asyncmem.cli.reports.telling import at_option, file_argument, json_option, load, tell
from asyncmem.figures import format_count, format_duration, format_share, format_size
from asyncmem.insight import reports
from asyncmem.insight.reports import Node, Tree

_LEAST = 0.01
"""The share of all bytes below which a line is not shown by itself."""


@click.command()
@file_argument
@at_option
@click.option("--all", "whole", is_flag=True, help="Show lines of less than 1% too.")
@json_option
def tree(file: str, time: float | None, *, whole: bool, as_json: bool) -> None:
    """Show whose memory was live when the most was, as a tree of the lines that had called for it.

    It is as deep as there are lines in the recording: `asyncmem run --frames`. JSON has all of it.
    """
    records = load(file)

    def show(found: Tree, console: Console) -> None:
        head = f"{format_size(found.nbytes)} live after {format_duration(found.time)}"
        root = Branch(Text(head), guide_style="")
        _grow(root, found.calls, found.nbytes, 0.0 if whole else _LEAST)
        console.print(root)

    tell(records, reports.tree(records, time), show, as_json=as_json)


def _grow(branch: Branch, calls: Sequence[Node], whole: int, least: float) -> None:
    small = [node for node in calls if node.nbytes < whole * least]
    for node in calls[: len(calls) - len(small)]:
        share = format_share(node.nbytes / whole if whole else 0)
        label = f"{format_size(node.nbytes)} ({share}, {format_count(node.buffers, 'buffer')})  {node.name}"
        _grow(branch.add(Text(label)), node.calls, whole, least)
    if small:
        nbytes = sum(node.nbytes for node in small)
        branch.add(Text(f"{format_size(nbytes)}  {format_count(len(small), 'smaller line')}"))
