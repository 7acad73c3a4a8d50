"""`asyncmem timeline`: what was live and reserved over time, drawn with letters."""

from collections.abc import Iterator

import click
from rich.console import Console

from asyncmem.cli.reports.telling import file_argument, json_option, load, tell
from asyncmem.figures import format_duration, format_size
from asyncmem.insight import reports
from asyncmem.insight.reports import Moment, Timeline

_MARGIN = 12
_HEIGHT = 12
_PLAIN = 100
"""Columns where there is no terminal whose width could be taken."""
_EIGHTHS = " ▁▂▃▄▅▆▇█"


@click.command()
@file_argument
@click.option("--moments", type=click.IntRange(1, 100_000), help="In how many parts the time is cut.")
@json_option
def timeline(file: str, moments: int | None, *, as_json: bool) -> None:
    """Draw how much was live over time, and how much was reserved.

    Blocks are what was live, the line above them is what was had from the device. Below are marks: `w` where requests
    had waited, `!` where some were refused.
    """
    records = load(file)
    console = Console()
    wide = console.width - _MARGIN if console.is_terminal and not as_json else _PLAIN
    tell(records, reports.timeline(records, moments or max(wide, 10)), _show, as_json=as_json)


def _show(found: Timeline, console: Console) -> None:
    for line in _drawn(found):
        console.print(line, no_wrap=True, overflow="ignore", crop=False)


def _drawn(found: Timeline) -> Iterator[str]:
    top = max(1, *(max(one.live, one.reserved) for one in found.moments))
    for row in reversed(range(_HEIGHT)):
        label = format_size(round(top * (row + 1) / _HEIGHT)) if row % 3 == 2 else ""
        yield f"{label:>{_MARGIN - 2}} ┤{''.join(_cell(one, row, top) for one in found.moments)}"
    yield f"{'':>{_MARGIN - 2}} └{'─' * len(found.moments)}"
    marks = "".join(_mark(one) for one in found.moments)
    if marks.strip():
        yield " " * _MARGIN + marks.rstrip()
    end = format_duration(found.seconds)
    yield " " * _MARGIN + "0 s" + end.rjust(len(found.moments) - 3)


def _cell(moment: Moment, row: int, top: int) -> str:
    filled = min(max(-(-moment.live * _HEIGHT * 8 // top) - row * 8, 0), 8)
    if filled == 0 and moment.reserved and (moment.reserved * _HEIGHT - 1) // top == row:
        return "─"
    return _EIGHTHS[filled]


def _mark(moment: Moment) -> str:
    if moment.out_of_memory:
        return "!"
    return "w" if moment.waits else " "
