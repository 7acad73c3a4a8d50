"""`asyncmem export`: a recording in a format that other programs read."""

from pathlib import Path

import click

from asyncmem.cli.parameters import force_option, need_free, written
from asyncmem.cli.recordings import file_argument, load
from asyncmem.cli.tables import progress
from asyncmem.insight.exports import FORMATS
from asyncmem.text import printable


@click.command()
@file_argument
@click.option("--to", "to", type=click.Choice(tuple(FORMATS)), required=True, help="The format.")
@click.option(
    "-o",
    "--output",
    metavar="OUT",
    help='The file; "-" is standard output. Without it FILE\'s name with the ending of the format.',
)
@force_option
def export(file: str, to: str, output: str | None, *, force: bool) -> None:
    """Write a recording in a format that other programs read.

    \b
      torch      a snapshot of PyTorch's memory, for its viewer (pytorch.org/memory_viz)
      perfetto   Chrome's JSON for ui.perfetto.dev: counters of what is live and
                 reserved, with waits, growth and trims below them
      csv        one record a line, below a line of names
      json       the same as objects, with all lines of each call
    """  # noqa: D301 -- to click a backspace means that lines are not to be joined
    ending, write = FORMATS[to]
    path = output or str(Path(file).with_suffix(ending))
    need_free(path, force=force, source=file)
    records = load(file)
    with progress(f"writing {path}"), written(path, force=force) as out:
        write(records, out)
    click.echo(f"{len(records):,} records written to {printable(path)}", err=True)
