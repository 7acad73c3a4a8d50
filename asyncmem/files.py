"""Opening files that may come from anywhere, and reading JSON in them."""

import errno
import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from os import PathLike, fspath
from typing import BinaryIO

from asyncmem.errors import BadTrace


@contextmanager
def open_file(path: str | PathLike[str]) -> Iterator[BinaryIO]:
    """Open a file to read its bytes in a block. Pipes and devices are refused: reading one may wait, or never end.

    Raises:
        OSError: It cannot be opened or read, or is no regular file; it is named.
    """
    try:
        with open(path, "rb", opener=_open_at_once) as file:  # a Path has no opener
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise OSError(errno.EINVAL, "Not a regular file")  # noqa: TRY301 -- named below
            yield file
    except OSError as error:
        error.filename = error.filename or fspath(path)
        raise


def _open_at_once(path: str, flags: int) -> int:
    # To open a pipe waits for its writer.
    return os.open(path, flags | os.O_NONBLOCK)


def read_json(path: str | PathLike[str]) -> object:
    """Read a file of JSON; see `parse_json`.

    Raises:
        OSError: It cannot be opened or read, or is no regular file.
        ValueError: It is no JSON, or more than memory holds.
    """
    with open_file(path) as file:
        try:
            return parse_json(file.read())
        except MemoryError:
            raise ValueError("more than memory holds") from None


def parse_json(text: bytes | str) -> object:
    """Return what JSON says.

    Raises:
        ValueError: It is none, is nested too deeply, or is more than memory holds.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    except MemoryError:
        raise ValueError("more than memory holds") from None


@contextmanager
def naming(file: str | PathLike[str]) -> Iterator[None]:
    """Name the file in faults found inside the block, and make a fault of what is too large for memory."""
    try:
        yield
    except BadTrace as fault:
        raise BadTrace(fault.got, fault.expected, file=fspath(file), row=fault.row, hint=fault.hint) from None
    except MemoryError:
        raise BadTrace("more than memory holds", "what fits into memory", file=fspath(file)) from None
