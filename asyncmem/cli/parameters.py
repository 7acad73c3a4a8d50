"""What several commands share: kinds of values, options, output files, and recordings with their figures."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import BinaryIO, Final, TypeVar

import click
from rich.console import Console

from asyncmem.cli.tables import output, progress
from asyncmem.errors import InvalidRequest
from asyncmem.figures import format_count, format_duration
from asyncmem.insight import Records, merge, read
from asyncmem.insight.names import PoolName
from asyncmem.text import printable, to_json
from asyncmem.units import parse_duration, parse_size

Figures = TypeVar("Figures")

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

files_argument = click.argument(
    "files", metavar="FILE.amem...", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False)
)
at_option = click.option(
    "--at", "time", metavar="TIME", type=TIME, help="A time since the recording began, as in 20ms; without it the peak."
)
pool_option = click.option("--pool", "name", metavar="NAME", help="The pool, if the recording has several.")


def refuse(reason: str, **given: object) -> None:
    """Refuse options that are given where they make no sense.

    Raises:
        click.UsageError: One is given; the reason comes after its name.
    """
    for name, value in given.items():
        if value:
            raise click.UsageError(f"--{name.replace('_', '-')} {reason}")


def check_output(
    path: str,
    *,
    force: bool,
    sources: Sequence[str] = (),
    as_json: bool = False,
    option: str = "-o",
    forcing: str = "--force",
) -> None:
    """Check that an output file may be written, before the work begins.

    Args:
        path: Its name, or "-" for standard output.
        force: Whether a file that exists may be overwritten.
        sources: The files that are read, which are never overwritten.
        as_json: Whether figures go to standard output.
        option: What names the file.
        forcing: What overwrites it, for the error.

    Raises:
        click.UsageError: The file exists and may not be overwritten, or standard output would be written to twice.
    """
    found = Path(path)
    if path == STANDARD_OUTPUT and as_json:
        raise click.UsageError(f'--json and "{option} -" both write to standard output')
    if path == STANDARD_OUTPUT or not found.is_file():
        return
    if any(found.samefile(source) for source in sources):
        raise click.BadParameter(f"{printable(path)} is what is read: choose another name", param_hint="-o")
    if not force:
        raise _taken(path, option, forcing)


@contextmanager
def written(path: str, *, force: bool) -> Iterator[BinaryIO]:
    """Open an output file, or standard output for "-". A new file is removed if the block does not complete.

    Raises:
        click.UsageError: The file exists and may not be overwritten.
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


def _taken(path: str, option: str = "-o", forcing: str = "--force") -> click.UsageError:
    return click.UsageError(f"{printable(path)} exists: {forcing} overwrites it, {option} names another")


# -- recordings --------------------------------------------------------------------------------------------------------

_LOST: Final = "buffers that were freed in them look as if they were live."


def load(*files: str) -> Records:
    """Read recordings, of several processes as one, and say on standard error what is missing in each."""
    return merge(*map(_load, files))


def _load(file: str) -> Records:
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
    files: Sequence[str],
    compute: Callable[[Records], Figures],
    show: Callable[[Figures, Console], None],
    *,
    as_json: bool,
) -> Figures:
    """Compute the figures of recordings and print them: as JSON with what is missing in the records, or by `show`."""
    records = load(*files)
    with progress(f"adding up {files[0]}"):
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
