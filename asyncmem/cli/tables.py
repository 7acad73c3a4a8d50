"""How figures are printed: numbers are never cut, and without a terminal no line is wrapped or filled up."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final, TypeAlias

from rich.console import Console, JustifyMethod, RenderableType
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Column, Table
from rich.text import Text

from asyncmem.text import printable

UNLIMITED: Final = 1 << 15
"""Columns of output that goes to a file or to another program: nothing is wrapped there."""

_LETTERS: Final = 12
"""How narrow a column of names may get before the whole table is wider than the screen."""
_GAP: Final = 2
"""Columns of the screen between one column of a table and the next."""

COLOURS: Final = {"LOW": "green", "MEDIUM": "cyan", "HIGH": "yellow", "CRITICAL": "red"}
"""Of the levels of a pool's pressure."""

Cell: TypeAlias = str | float | Text


def output() -> Console:
    """Return standard output for figures. Text is printed as it is: names have brackets and colons that are no markup.

    Without a terminal its lines are as long as they need to be.
    """
    console = Console(highlight=False, markup=False, emoji=False)
    return console if console.is_terminal else Console(highlight=False, markup=False, emoji=False, width=UNLIMITED)


def table_of(
    headings: Sequence[str],
    rows: Iterable[Sequence[Cell]],
    *,
    left: Sequence[str] = (),
    whole: Sequence[str] = (),
    header: bool = True,
) -> Table:
    """Make a table. Words in it are no markup and steer no terminal; `Text` is taken as it is.

    Args:
        headings: Those of its columns.
        rows: Their cells; numbers get separators.
        left: The columns that are words, and may be folded; the others are figures.
        whole: The columns that begin at the left and are never folded.
        header: Whether the headings are shown.
    """
    table = Table(box=None, padding=(0, 1), pad_edge=False, show_header=header)
    for heading in headings:
        folds = heading in left
        justify: JustifyMethod = "left" if folds or heading in whole else "right"
        table.add_column(printable(heading), justify=justify, no_wrap=not folds, overflow="fold")
    for row in rows:
        table.add_row(*map(_cell, row))
    return table


def _cell(value: Cell) -> Text:
    if isinstance(value, Text):
        return value
    return Text(printable(value) if isinstance(value, str) else f"{value:,}")


def verdict(met: bool) -> Text:
    """Return whether a bound is met, in its colour."""
    return Text("met", style="green") if met else Text("not met", style="red")


def show(content: RenderableType, console: Console) -> None:
    """Print; without a terminal no line ends in blanks."""
    if console.is_terminal:
        console.print(content)
        return
    for line in console.render_lines(content, pad=False):
        console.out("".join(part.text for part in line).rstrip(), highlight=False)


def show_table(table: Table, console: Console) -> None:
    """Print a table with all of its columns; a terminal that is too narrow for them breaks the lines itself."""
    width = console.width
    console.width = max(width, sum(_least(column, console) + _GAP for column in table.columns))
    try:
        show(table, console)
    finally:
        console.width = width


def _least(column: Column, console: Console) -> int:
    """Return the width below which a column would lose something, or its names could not be read any more."""
    options = console.options.update(max_width=1 << 20)
    longest = max(console.measure(cell, options=options).maximum for cell in (column.header, *column.cells))
    return longest if column.no_wrap else min(longest, _LETTERS)


@contextmanager
def progress(doing: str, *, quiet: bool = False, redraws: bool = True) -> Iterator[Callable[[str], None]]:
    """Show on a terminal's standard error what is being done and for how long; the block may pass on something else.

    Args:
        doing: What is done first.
        quiet: Whether to show nothing.
        redraws: Whether a thread redraws it meanwhile, which takes time from what is done.
    """
    parts = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    console = Console(stderr=True, markup=False)
    quiet = quiet or not console.is_terminal
    with Progress(*parts, console=console, transient=True, auto_refresh=redraws, disable=quiet) as shown:
        task = shown.add_task(printable(doing))
        yield lambda text: shown.update(task, description=printable(text), refresh=True)
