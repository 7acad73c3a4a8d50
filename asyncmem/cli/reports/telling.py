"""What the reports share: a file of records in, figures out, as JSON or for a person."""

import json
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import TypeVar

import click
from rich.console import Console

from asyncmem.cli.parameters import read_duration
from asyncmem.cli.tables import paper
from asyncmem.figures import format_count
from asyncmem.insight import Records, read

_LOST = "what they freed looks as if it were live."

Figures = TypeVar("Figures")

file_argument = click.argument("file", metavar="FILE.amem", type=click.Path(exists=True, dir_okay=False))
json_option = click.option(
    "--json", "as_json", is_flag=True, help="Print the figures as JSON on standard output, and nothing else."
)


def read_moment(context: click.Context, parameter: click.Parameter, text: str | None) -> float | None:
    """Read a time from the beginning of a recording, as the callback of an option that may be left out."""
    return None if text is None else read_duration(context, parameter, text)


at_option = click.option(
    "--at", "time", metavar="TIME", callback=read_moment, help="When, from the beginning: at the peak without it."
)


def top_option(default: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make the option that says how many lines are printed."""
    return click.option(
        "--top", type=click.IntRange(min=1), default=default, show_default=True, help="So many lines are shown."
    )


def load(file: str) -> Records:
    """Read a file of records, and say on the error output what is missing in it."""
    try:
        records = read(file)
    except ModuleNotFoundError as error:
        raise click.ClickException(str(error)) from error
    except OSError as error:
        raise click.FileError(file, error.strerror) from error
    lost = f"{format_count(records.lost, 'record')} came too fast to be written: {_LOST}" if records.lost else ""
    for sentence in filter(None, (records.note, lost)):
        click.echo(f"{file}: {sentence}", err=True)
    return records


def tell(records: Records, figures: Figures, show: Callable[[Figures, Console], None], *, as_json: bool) -> None:
    """Print figures, as JSON with what is missing in the records, or by a function that shows them."""
    if as_json:
        found = {"note": records.note, "lost": records.lost, **_plain_fields(figures)}
        click.echo(json.dumps(found, indent=2))
    else:
        show(figures, paper())


def _plain_fields(figures: object) -> dict[str, object]:
    assert is_dataclass(figures)
    return {field.name: _plain(getattr(figures, field.name)) for field in fields(figures)}


def _plain(value: object) -> object:
    if is_dataclass(value):
        return _plain_fields(value)
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return {name: _plain(one) for name, one in value._asdict().items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return value
