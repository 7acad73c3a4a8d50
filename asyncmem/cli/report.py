"""`asyncmem report`: all pictures of a recording in one page for a browser."""

from pathlib import Path
from typing import Final

import click

from asyncmem.cli.parameters import STANDARD_OUTPUT, force_option, json_option, need_free, written
from asyncmem.cli.recordings import file_argument, load, print_json
from asyncmem.cli.tables import progress
from asyncmem.figures import format_size
from asyncmem.insight import reports
from asyncmem.insight.pictures import page
from asyncmem.text import printable

_FIGURES: Final = (reports.summary, reports.timeline, reports.segments, reports.tree, reports.waits, reports.leaks)
"""What the page draws."""


@click.command()
@file_argument
@click.option(
    "-o", "--output", metavar="OUT.html", help='The page; "-" is standard output. Without it FILE\'s name with .html.'
)
@force_option
@json_option
def report(file: str, output: str | None, *, force: bool, as_json: bool) -> None:
    """Draw a recording in one page, which a browser shows without a network.

    What was live over time by tag, with what was reserved, the limit, growth, waits and refusals; the segments with
    their holes, at the peak and at the end; and as icicles by the lines of the program: what was live at the peak,
    what was never freed, and what waited for how long. --json prints the figures of it.
    """
    path = output or str(Path(file).with_suffix(".html"))
    need_free(path, force=force, source=file, as_json=as_json)
    records = load(file)
    with progress(f"drawing {file}"):
        drawn = page(records, Path(file).name).encode("utf-8", "xmlcharrefreplace")
        figures = {one.__name__: one(records) for one in _FIGURES} if as_json else {}
    with written(path, force=force) as out:
        out.write(drawn)
    if as_json:
        print_json(records, {"output": path, "nbytes": len(drawn), **figures})
    elif path != STANDARD_OUTPUT:
        click.echo(f"{printable(path)} written, {format_size(len(drawn))}: open it in a browser")
