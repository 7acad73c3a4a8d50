"""Recordings as the commands read them, and how their figures are printed."""

from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Final, TypeVar

import click
from rich.console import Console

from asyncmem.cli.parameters import TIME
from asyncmem.cli.tables import output, progress
from asyncmem.figures import format_count, format_duration
from asyncmem.insight import Records, read
from asyncmem.insight.names import PoolName
from asyncmem.text import printable, to_json

Figures = TypeVar("Figures")

_LOST: Final = "buffers that were freed in them look as if they were live."

file_argument = click.argument("file", metavar="FILE.amem", type=click.Path(exists=True, dir_okay=False))
at_option = click.option(
    "--at", "time", metavar="TIME", type=TIME, help="A time since the recording began, as in 20ms; without it the peak."
)
pool_option = click.option("--pool", "name", metavar="NAME", help="The pool, if the recording has several.")


def load(file: str) -> Records:
    """Read a recording, and say on standard error what is missing in it."""
    try:
        with progress(f"reading {file}"):
            records = read(file)
    except ModuleNotFoundError as error:
        raise click.ClickException(str(error)) from error
    except OSError as error:
        raise click.FileError(file, error.strerror) from error
    lost = f"{format_count(records.lost, 'record')} came too fast to be written: {_LOST}" if records.lost else ""
    for sentence in filter(None, (records.note, lost)):
        click.echo(f"{printable(file)}: {sentence}", err=True)
    return records


def within(records: Records, time: float | None, option: str) -> float | None:
    """Return a time that an option gives.

    Raises:
        click.BadParameter: The recording is shorter than that.
    """
    if time is not None and time > records.duration:
        message = f"{format_duration(time)} is after its end: the recording took {format_duration(records.duration)}"
        raise click.BadParameter(message, param_hint=option)
    return time


def pool_of(records: Records, name: str | None) -> PoolName:
    """Return the pool that is meant: the only one, or the one that is named.

    Raises:
        click.BadParameter: There is none of that name, or there are several and none is named.
        click.ClickException: The recording has no pool.
    """
    pools = {pool.name: pool for pool in reversed(records.names.pools)}
    for one, pool in pools.items():
        if name in {one, printable(one)} or (name is None and len(pools) == 1):
            return pool
    if not pools:
        raise click.ClickException("the recording has no pool")
    got = printable(name) if name else "none, and there are several"
    message = f"expected one of {', '.join(map(printable, sorted(pools)))}, got {got}"
    raise click.BadParameter(message, param_hint="--pool")


def print_figures(
    file: str, compute: Callable[[Records], Figures], show: Callable[[Figures, Console], None], *, as_json: bool
) -> Figures:
    """Compute a recording's figures and print them: as JSON with what is missing in the records, or by `show`."""
    records = load(file)
    with progress(f"adding up {file}"):
        figures = compute(records)
    if as_json:
        print_json(records, figures)
    else:
        show(figures, output())
    return figures


def print_json(records: Records, figures: object) -> None:
    """Print figures, a dataclass or a dict, as JSON with what is missing in the records."""
    found = plain(figures)
    assert isinstance(found, dict)
    click.echo(to_json({"note": records.note, "lost": records.lost, **found}, indent=2))


def plain(value: object) -> object:
    """Return dataclasses and named tuples as dicts, with all that is in them."""
    if is_dataclass(value):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return plain(value._asdict())
    if isinstance(value, dict):
        return {name: plain(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    return value
