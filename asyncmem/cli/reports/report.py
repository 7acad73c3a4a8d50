"""`asyncmem report`: all pictures of a recording in one page for a browser."""

from dataclasses import dataclass
from pathlib import Path

import click
from rich.console import Console

from asyncmem.cli.reports.telling import file_argument, json_option, load, tell
from asyncmem.cli.reports.writing import force_option, need_free, written
from asyncmem.figures import format_size
from asyncmem.insight.needs import need_bokeh
from asyncmem.insight.pictures import page


@dataclass(frozen=True)
class Written:
    """A page that was written."""

    output: str
    """Where it is."""
    nbytes: int
    """How long it is."""


@click.command()
@file_argument
@click.option("-o", "--output", metavar="OUT.html", help="Where it goes: FILE's name and .html without it.")
@force_option
@json_option
def report(file: str, output: str | None, *, force: bool, as_json: bool) -> None:
    """Draw all of it in one page, that a browser shows without any network.

    What was live over time by tag, with what was reserved, the limit, growth, waits and refusals; the segments with
    their holes, at the peak and at the end; and as icicles by the lines of the program: whose memory it was at the
    peak, what was never freed, and who waited for how long.
    """
    try:
        need_bokeh("drawing a report")
    except ModuleNotFoundError as error:
        raise click.ClickException(str(error)) from error
    path = Path(output) if output else Path(file).with_suffix(".html")
    need_free(path, force=force)
    records = load(file)
    drawn = page(records, Path(file).name).encode("utf-8", "xmlcharrefreplace")
    with written(path, force=force) as out:
        out.write(drawn)
    tell(records, Written(str(path), len(drawn)), _show, as_json=as_json)


def _show(written: Written, console: Console) -> None:
    console.print(f"{written.output} written, {format_size(written.nbytes)}: open it in a browser", soft_wrap=True)
