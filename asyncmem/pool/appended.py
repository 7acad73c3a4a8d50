"""Files that are written beside a program, in whole pieces; one of them is the journal of a pool."""

from __future__ import annotations

import atexit
import errno
import fcntl
import os
import stat
import threading
import weakref
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

from asyncmem.errors import InvalidRequest
from asyncmem.pool.alarm import alarm
from asyncmem.text import printable, to_json

if TYPE_CHECKING:
    from asyncmem.core import Core

VERSION: Final = 1
"""Of a journal."""


class AppendedFile:
    """A new file that ends with a whole piece, also where the disk is full before the next one is written.

    Nothing is kept back: what `write` has taken is the system's. While it is open, no other one is made of it, neither
    here nor in another process (by `flock`, where the file system has that).
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
        if not self._file.closed:
            with suppress(OSError):
                fcntl.flock(self._file.fileno(), fcntl.LOCK_UN)  # also for processes that were forked meanwhile
        self._file.close()


def _open_locked(path: str, flags: int) -> int:
    # Emptied only once it is known that no process writes it.
    file = os.open(path, flags & ~os.O_TRUNC, 0o666)
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise FileExistsError(errno.EEXIST, "It is being written", path) from None
        except OSError:  # a file system without locks
            pass
        if stat.S_ISREG(os.fstat(file).st_mode):
            os.ftruncate(file, 0)
    except BaseException:
        os.close(file)
        raise
    return file


class JournalFile:
    """The calls of a pool's heap and scheduler, in a file that `asyncmem journal` reads, while the pool lives.

    A file that exists is never written over: the name gets a number.

    Args:
        path: Where to write.
        pool: The pool's name.
        device: Its device's name.

    Attributes:
        core: Whose journal it is: that of a core that was made with one.
    """

    core: Core | None = None

    def __init__(self, path: str, pool: str, device: str) -> None:
        """Make the file (blocks).

        Raises:
            InvalidRequest: It cannot be made.
        """
        from importlib.metadata import version

        names = {"pool": printable(pool), "device": printable(device)}
        self._heading = to_json({"journal": VERSION, "asyncmem": version("asyncmem"), **names}).encode() + b"\n"
        self._writing = threading.Lock()
        try:
            self.path, self._file = _make(Path(path).absolute())
        except (OSError, ValueError) as error:  # a name that no file can have is the latter
            why = getattr(error, "strerror", None) or error
            raise InvalidRequest("journal", path, f"a file that can be made ({why})") from error
        _files.add(self)

    def write(self) -> None:
        """Write what has come since (blocks). The first error ends all writing, with a warning."""
        core = self.core
        if core is None or core.forked:
            return
        with self._writing:
            if self._file.closed:
                return
            try:
                self._file.write(self._heading)
                self._heading = b""
                while lines := core.read_journal():
                    self._file.write(lines)
            except (OSError, MemoryError) as error:
                self._file.close()
                alarm(f"the journal {printable(str(self.path))} ends here: {error}", RuntimeWarning)

    def end(self) -> None:
        """Write the rest, and close the file (blocks); once is enough. One without any is removed."""
        self.write()
        if self.core is None or not self.core.forked:
            self._file.close()
        if self.core is None:
            self.path.unlink(missing_ok=True)

    def __del__(self) -> None:
        """Write the rest of a pool that was dropped."""
        if hasattr(self, "_file"):
            self.end()


def _make(path: Path) -> tuple[Path, AppendedFile]:
    number = 2
    while True:
        try:
            return path, AppendedFile(path, "xb")
        except FileExistsError:
            stem = path.stem.removesuffix(f".{number - 1}")
            path = path.with_name(f"{stem}.{number}{path.suffix}")
            number += 1


_files: Final[weakref.WeakSet[JournalFile]] = weakref.WeakSet()


@atexit.register
def _end_all() -> None:
    for file in tuple(_files):
        file.end()
