"""Shows a pipeline's report while it runs: redrawn on a terminal, once at the end elsewhere. Needs `rich`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from asyncmem.pipeline.report import HEAD, cells

if TYPE_CHECKING:
    from collections.abc import Callable

    from asyncmem.pipeline.report import PipelineReport

REFRESH: float = 0.25
"""Seconds between two looks."""


async def show(report: Callable[[], PipelineReport], console: Console | None = None) -> None:
    """Show a report on a console, standard error by default, until cancelled; the last state stays."""
    console = console or Console(stderr=True)
    if not console.is_terminal:
        try:
            await anyio.sleep_forever()
        finally:
            console.print(_table(report()))
    # No refreshing thread: it would compete with the pipeline.
    with Live(console=console, auto_refresh=False) as live:
        try:
            while True:
                await anyio.sleep(REFRESH)
                live.update(_table(report()), refresh=True)
        finally:
            live.update(_table(report()), refresh=True)


def _table(report: PipelineReport) -> Table:
    # In two lines, so that 80 columns are enough.
    titles = (title.replace("for ", "for\n").replace("kept ", "kept\n").replace("held ", "held\n") for title in HEAD)
    table = Table(*titles, title=Text(report.headline()), caption=Text(report.advice or ""))
    table.box, table.padding, table.pad_edge = None, (0, 1, 0, 0), False
    for column in table.columns:
        column.justify, column.no_wrap = "right", True
    table.columns[0].justify = "left"
    for stage in report.stages:
        table.add_row(*map(Text, cells(stage, mark=stage.name == report.bottleneck)))
    return table
