"""`asyncmem export`: a recording in a format that others read."""

from pathlib import Path

import click

from asyncmem.cli.reports.telling import file_argument, load
from asyncmem.cli.reports.writing import force_option, need_free, written
from asyncmem.insight.exports import FORMATS


@click.command()
@file_argument
@click.option("--to", "to", type=click.Choice(tuple(FORMATS)), required=True, help="The format.")
@click.option("-o", "--output", metavar="OUT", help="Where it goes: FILE's name with another end without it.")
@force_option
def export(file: str, to: str, output: str | None, *, force: bool) -> None:
    """Write a recording in a format that others read.

    \b
      torch      a snapshot of PyTorch's memory, for its viewer (pytorch.org/memory_viz)
      perfetto   Chrome's JSON for ui.perfetto.dev: counters of what is live and
                 reserved, with waits, growth and trims below them
      csv        one record a line, below a line of names
      json       the same as objects, with all lines of each call
    """  # noqa: D301 -- to click a backspace means that lines are not to be joined
    end, write = FORMATS[to]
    path = Path(output) if output else Path(file).with_suffix(end)
    need_free(path, force=force)
    records = load(file)
    with written(path, force=force) as out:
        write(records, out)
    click.echo(f"{len(records):,} records written to {path}", err=True)
