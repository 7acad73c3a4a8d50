"""What figures are printed on, and in which tables: numbers are never cut, names are folded down to some letters."""

from collections.abc import Sequence
from typing import Final

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

_WIDE: Final = 240
"""Columns for output that goes to a file or another program: nothing is cut there."""

_LETTERS: Final = 12
"""So narrow a column of names may get before the whole table is wider than the screen."""
_EDGES: Final = 2
"""Columns of the screen that part one column of a table from the next."""


def paper(*, markup: bool = False) -> Console:
    """Answer what figures are printed on: the terminal, or without one lines that are as long as they are."""
    console = Console(highlight=False, markup=markup)
    return console if console.is_terminal else Console(highlight=False, markup=markup, width=_WIDE)


def columns(*headings: str, left: Sequence[str] = ()) -> Table:
    """Make a table of numbers; the columns named `left` are text."""
    table = Table(box=None, padding=(0, 1), pad_edge=False)
    for heading in headings:
        if heading in left:
            table.add_column(heading, overflow="fold")
        else:
            table.add_column(heading, justify="right", no_wrap=True)
    return table


def add(table: Table, *cells: str) -> None:
    """Add a row of words that are no markup: names of files and functions have brackets."""
    table.add_row(*map(Text, cells))


def print_whole(table: Table, console: Console) -> None:
    """Print a table with all of its columns; a terminal that is too narrow for them breaks the lines itself."""
    width = console.width
    console.width = max(width, sum(_least(column, console) + _EDGES for column in table.columns))
    try:
        console.print(table)
    finally:
        console.width = width


def _least(column: Column, console: Console) -> int:
    """Answer the width below which a column would lose something, or its names could not be read any more."""
    options = console.options.update(max_width=1 << 20)
    longest = max(console.measure(cell, options=options).maximum for cell in (column.header, *column.cells))
    return longest if column.no_wrap else min(longest, _LETTERS)
