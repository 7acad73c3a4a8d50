"""`JournalFile`: what a pool's heap and scheduler are told, in a file that `asyncmem journal` reads."""

from __future__ import annotations

import atexit
import itertools
import threading
import weakref
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Final

from asyncmem.errors import InvalidRequest
from asyncmem.pool.alarm import alarm
from asyncmem.pool.appended import AppendedFile
from asyncmem.text import printable, to_json

if TYPE_CHECKING:
    from asyncmem.core import Core

VERSION: Final = 1


class JournalFile:
    """Writes the journal of a pool while that lives.

    A file that exists is never written over: the name gets a number.

    Args:
        path: Where to write.
    """

    def __init__(self, path: str) -> None:
        """Make the file (blocks).

        Raises:
            InvalidRequest: It cannot be made.
        """
        self._core: Core | None = None
        self._heading: dict[str, object] = {"journal": VERSION, "asyncmem": version("asyncmem")}
        self._writing = threading.Lock()
        try:
            self.path, self._file = _make(Path(path).absolute())
        except (OSError, ValueError) as error:  # a name that no file can have is the latter
            why = getattr(error, "strerror", None) or error
            raise InvalidRequest("journal", path, f"a file that can be made ({why})") from error
        _files.add(self)

    def begin(self, core: Core, pool: str) -> None:
        """Say whose journal it is: that of a core that was made with one."""
        self._heading |= {"pool": printable(pool), "device": printable(core.device.name)}
        self._core = core

    def write(self) -> None:
        """Write what has come since (blocks). The first error ends all writing, with a warning."""
        core = self._core
        if core is None or core.forked:
            return
        with self._writing:
            if self._file.closed:
                return
            try:
                if self._heading:
                    self._file.write(to_json(self._heading).encode() + b"\n")
                    self._heading.clear()
                while lines := core.read_journal():
                    self._file.write(lines)
            except (OSError, MemoryError) as error:
                self._file.close()
                alarm(f"the journal {printable(str(self.path))} ends here: {error}", RuntimeWarning)

    def end(self) -> None:
        """Write the rest, and close the file (blocks); once is enough. One that was never begun is removed."""
        self.write()
        core = self._core
        if core is None or not core.forked:
            self._file.close()
        if core is None:
            self.path.unlink(missing_ok=True)

    def __del__(self) -> None:
        """Write the rest of a pool that was dropped."""
        if hasattr(self, "_file"):
            self.end()


def _make(path: Path) -> tuple[Path, AppendedFile]:
    for number in itertools.count(2):
        try:
            return path, AppendedFile(path, "xb")
        except FileExistsError:
            stem = path.stem.removesuffix(f".{number - 1}")
            path = path.with_name(f"{stem}.{number}{path.suffix}")
    raise AssertionError("numbers do not end")


_files: Final[weakref.WeakSet[JournalFile]] = weakref.WeakSet()


@atexit.register
def _end_all() -> None:
    for file in tuple(_files):
        file.end()
