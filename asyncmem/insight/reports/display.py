"""What a notebook shows of a report: a table with a bar in each row, or a picture made of text."""

from collections.abc import Iterable, Sequence
from html import escape
from typing import Final, NamedTuple

from asyncmem.text import printable

_MOST_BARS: Final = 30
_LEFT: Final = 'style="text-align: left"'


class Bar(NamedTuple):
    """A row.

    Attributes:
        name: What it is about.
        length: How long the bar is, relative to the longest.
        text: What stands behind it.
        depth: How far the name is indented.
    """

    name: str
    length: float
    text: str
    depth: int = 0


def bars(title: str, rows: Sequence[Bar]) -> str:
    """Return a table of the first rows."""
    most = max((row.length for row in rows), default=0) or 1
    shown = "".join(_row(row, 100 * row.length / most) for row in rows[:_MOST_BARS])
    more = f"<tr><td {_LEFT}>and {len(rows) - _MOST_BARS:,} more</td></tr>" if len(rows) > _MOST_BARS else ""
    return f"<table><caption {_LEFT}>{_text(title)}</caption>{shown}{more}</table>"


def _row(row: Bar, percent: float) -> str:
    bar = f'<div style="width: {percent:.1f}%; height: 0.8em; background: #4a7ebb"></div>'
    name = f'<td style="text-align: left; padding-left: {row.depth + 0.5}em">{_text(row.name)}</td>'
    return f'<tr>{name}<td style="width: 16em">{bar}</td><td {_LEFT}>{_text(row.text)}</td></tr>'


def drawing(lines: Iterable[str]) -> str:
    """Return a picture made of lines of text."""
    return f'<pre style="line-height: 1.2">{escape(chr(10).join(map(printable, lines)))}</pre>'


def _text(text: str) -> str:
    return escape(printable(text))
