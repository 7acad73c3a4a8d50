"""`asyncmem journal`: the calls of a pool's heap and scheduler, printed or replayed."""

import json

import click

from asyncmem.cli.tables import progress
from asyncmem.errors import InvalidRequest
from asyncmem.replay import Journal
from asyncmem.text import printable
from asyncmem.units import parse_size


def _read_changes(context: click.Context, parameter: click.Parameter, texts: tuple[str, ...]) -> dict[str, object]:
    changes = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise click.BadParameter(f"expected SETTING=VALUE, got {text!r}", ctx=context, param=parameter)
        try:
            changes[name.strip()] = _read_value(value.strip())
        except InvalidRequest as error:
            raise click.BadParameter(f"{name}: {error}", ctx=context, param=parameter) from error
    return changes


def _read_value(text: str) -> object:
    try:
        found = json.loads(text)
    except ValueError:
        return parse_size(text)
    return found


@click.command()
@click.argument("file", metavar="FILE", type=click.Path(exists=True, dir_okay=False))
@click.option("--replay", "replaying", is_flag=True, help="Replay the calls on a fresh scheduler, and compare effects.")
@click.option(
    "--with",
    "changes",
    multiple=True,
    metavar="SETTING=VALUE",
    callback=_read_changes,
    help="Replay with another setting of the scheduler, as in bypass=0; may be repeated.",
)
def journal(file: str, changes: dict[str, object], *, replaying: bool) -> None:
    """Print the calls of a pool's heap and scheduler, and what they decided.

    FILE was written by a pool with the option `journal`. Each call is a line, with its time in seconds if it has one;
    below it are its effects. Requests are numbered in their order.

    With --replay, or --with, the calls are made on a fresh heap and scheduler instead, and the first call is printed
    whose effects differ. Exits with 1 if there is one.
    """
    found = Journal(file)
    if not (replaying or changes):
        for line in found.lines():
            click.echo(line)
        return
    with progress(f"replaying {file}"):
        difference = found.replay(**changes)
    if difference is None:
        click.echo(f"{printable(file)}: the same is decided again")
        return
    click.echo(f"{printable(file)}, {difference}")
    raise click.exceptions.Exit(1)
