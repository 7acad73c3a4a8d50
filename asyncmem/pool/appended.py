"""A file to which whole pieces are appended."""

from __future__ import annotations

import errno
import os
import stat
import sys
from contextlib import suppress
from typing import TYPE_CHECKING

if sys.platform != "win32":
    import fcntl

if TYPE_CHECKING:
    from pathlib import Path


class AppendedFile:
    """A new file that ends with a whole piece, also where the disk is full before the next one is written.

    Nothing is kept back: what `write` has taken is the system's. While it is open, no other one is made of it, neither
    here nor in another process (by `flock`, where the system has that).
    """

    def __init__(self, path: Path, mode: str) -> None:
        """Make it, with "xb" or "wb" as in `open`.

        Raises:
            FileExistsError: It exists and the mode is "xb", or it is being written.
            OSError: It cannot be opened.
        """
        self._file = open(path, mode, buffering=0, opener=_open_locked)  # noqa: SIM115 -- a Path has no opener
        self._end = 0

    @property
    def closed(self) -> bool:
        """Whether it is closed."""
        return self._file.closed

    def fileno(self) -> int:
        """Return its descriptor."""
        return self._file.fileno()

    def write(self, piece: bytes) -> None:
        """Append a piece.

        Raises:
            OSError: It could not be written; what had come of it is taken away again.
        """
        left = memoryview(piece)
        try:
            while left:
                left = left[self._file.write(left) :]
        except OSError:
            with suppress(OSError):
                os.ftruncate(self._file.fileno(), self._end)
            raise
        self._end += len(piece)

    def close(self) -> None:
        """Close it."""
        if sys.platform != "win32" and not self._file.closed:
            with suppress(OSError):
                fcntl.flock(self._file.fileno(), fcntl.LOCK_UN)  # also for processes that were forked meanwhile
        self._file.close()


def _open_locked(path: str, flags: int) -> int:
    # Emptied only once it is known that no process writes it.
    file = os.open(path, flags & ~os.O_TRUNC, 0o666)
    try:
        _lock(file, path)
        if stat.S_ISREG(os.fstat(file).st_mode):
            os.ftruncate(file, 0)
    except BaseException:
        os.close(file)
        raise
    return file


def _lock(file: int, path: str) -> None:
    if sys.platform == "win32":
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise FileExistsError(errno.EEXIST, "It is being written", path) from None
    except OSError:  # a file system without locks
        return
