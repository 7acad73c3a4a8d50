"""Kinds of command-line values, options and output files that several commands share."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Final

import click

from asyncmem.errors import InvalidRequest
from asyncmem.text import printable
from asyncmem.units import parse_duration, parse_size

STANDARD_OUTPUT: Final = "-"

json_option = click.option(
    "--json", "as_json", is_flag=True, help="Print the figures as JSON on standard output, and nothing else."
)
force_option = click.option("--force", is_flag=True, help="Overwrite a file that exists.")


class Quantity(click.ParamType):  # type: ignore[type-arg]  # generic since click 8.5
    """A number with its unit. A bare number is refused, except zero: it may mean either of two units.

    Args:
        name: What it is, for the help.
        parse: Reads it.
        units: Two units to suggest.
    """

    def __init__(self, name: str, parse: Callable[[str], object], units: tuple[str, str]) -> None:
        self.name = name
        self._parse = parse
        self._units = units

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> object:
        """Read text; click may give what was read before."""
        if not isinstance(value, str):
            return value
        try:
            found = self._parse(value)
        except InvalidRequest as error:
            self.fail(f"expected {error.expected}, got {error.got}", param, ctx)
        number = value.strip()
        if number[-1].isdigit() and number.strip("0."):
            choices = " or ".join(f'"{number} {unit}"' for unit in self._units)
            self.fail(f"{value!r} has no unit: write {choices}", param, ctx)
        return found


SIZE: Final = Quantity("size", parse_size, ("MiB", "B"))
TIME: Final = Quantity("time", parse_duration, ("ms", "s"))


def refuse(reason: str, **given: object) -> None:
    """Refuse options that are given where they make no sense.

    Raises:
        click.UsageError: One is given; the reason comes after its name.
    """
    for name, value in given.items():
        if value:
            raise click.UsageError(f"--{name.replace('_', '-')} {reason}")


def need_free(path: str, *, force: bool, source: str | None = None, as_json: bool = False, option: str = "-o") -> None:
    """Check that an output file may be written, before the work begins.

    Args:
        path: Its name, or "-" for standard output.
        force: Whether a file that exists may be overwritten.
        source: The file that is read, which is never overwritten.
        as_json: Whether figures go to standard output.
        option: What named the file.

    Raises:
        click.BadParameter: The file exists and may not be overwritten.
        click.UsageError: Standard output would be written to twice.
    """
    found = Path(path)
    if path == STANDARD_OUTPUT and as_json:
        raise click.UsageError(f'--json and "{option} -" both write to standard output')
    if path == STANDARD_OUTPUT or not found.is_file():
        return
    if source is not None and found.samefile(source):
        raise click.BadParameter(f"{printable(path)} is what is read: choose another name", param_hint="-o")
    if not force:
        raise _taken(path)


@contextmanager
def written(path: str, *, force: bool) -> Iterator[BinaryIO]:
    """Open an output file, or standard output for "-". A new file is removed if the block does not complete.

    Raises:
        click.BadParameter: The file exists and may not be overwritten.
        click.FileError: It cannot be written.
    """
    if path == STANDARD_OUTPUT:
        yield sys.stdout.buffer
        sys.stdout.flush()
        return
    found = Path(path)
    is_new = not (force or (found.exists() and not found.is_file()))  # a pipe or a device is written to as it is
    try:
        with found.open("xb" if is_new else "wb") as out:
            try:
                yield out
                out.flush()
            except BaseException:
                if is_new:
                    found.unlink()
                raise
    except FileExistsError as error:
        raise _taken(path) from error
    except OSError as error:
        raise click.FileError(path, error.strerror) from error


def _taken(path: str) -> click.BadParameter:
    message = f"{printable(path)} exists: --force overwrites it, -o names another"
    return click.BadParameter(message, param_hint="-o")
