"""What the reports share that write a file: nothing is written over unasked, and nothing is left half done."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import click

force_option = click.option("--force", is_flag=True, help="Write over a file that exists.")


def need_free(path: Path, *, force: bool) -> None:
    """Make sure that a file may be written, before all the work is done.

    Raises:
        click.BadParameter: There is one of that name.
    """
    if path.exists() and not force:
        raise _taken(path)


@contextmanager
def written(path: Path, *, force: bool) -> Iterator[BinaryIO]:
    """Give the file to write to; a new one is taken away again where that does not come to its end.

    Raises:
        click.BadParameter: There is one of that name, and it may not be written over.
        click.FileError: It cannot be written.
    """
    try:
        with path.open("wb" if force else "xb") as out:
            try:
                yield out
                out.flush()
            except BaseException:
                if not force:
                    path.unlink()
                raise
    except FileExistsError as error:
        raise _taken(path) from error
    except OSError as error:
        raise click.FileError(str(path), error.strerror) from error


def _taken(path: Path) -> click.BadParameter:
    return click.BadParameter(f"{path} exists: --force writes over it, -o names another", param_hint="-o")
