"""`asyncmem export`: a recording in a format that others read."""

from pathlib import Path

import click

from asyncmem.cli.reports.telling import file_argument, load
from asyncmem.insight.exports import FORMATS


@click.command()
@file_argument
@click.option("--to", "to", type=click.Choice(tuple(FORMATS)), required=True, help="The format.")
@click.option("-o", "--output", metavar="OUT", help="Where it goes: FILE's name with another end without it.")
@click.option("--force", is_flag=True, help="Write over a file that exists.")
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
    records = load(file)
    try:
        with path.open("wb" if force else "xb") as out:
            write(records, out)
    except FileExistsError as error:
        message = f"{path} exists: --force writes over it, -o names another"
        raise click.BadParameter(message, param_hint="-o") from error
    except OSError as error:
        raise click.FileError(str(path), error.strerror) from error
    click.echo(f"{len(records):,} records written to {path}", err=True)
