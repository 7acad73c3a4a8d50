"""`asyncmem journal`: what a pool's heap and scheduler were told, printed, or told again."""

import json

import click

from asyncmem.errors import InvalidRequest
from asyncmem.replay import Journal
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
@click.option("--replay", "replaying", is_flag=True, help="Tell a fresh scheduler the same, and compare its effects.")
@click.option(
    "--with",
    "changes",
    multiple=True,
    metavar="SETTING=VALUE",
    callback=_read_changes,
    help="Replay with another setting of the scheduler, as in bypass=0; may be repeated.",
)
def journal(file: str, changes: dict[str, object], *, replaying: bool) -> None:
    """Print what a pool's heap and scheduler were told, and what they decided.

    FILE was written by a pool with the option `journal`. Each call is a line, with its time in seconds where it tells
    one; below it stand its effects. Requests are numbered in the order of their coming.

    With --replay, or --with, a fresh heap and scheduler are told the same instead, and the first call is printed of
    which they make something else. Exits with 1 where there is one.
    """
    found = Journal(file)
    if not (replaying or changes):
        for line in found.lines():
            click.echo(line)
        return
    difference = found.replay(**changes)
    if difference is None:
        click.echo(f"{file}: the same is decided again")
        return
    click.echo(f"{file}, {difference}")
    raise click.exceptions.Exit(1)
