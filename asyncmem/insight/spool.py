"""`Spool`: the thread that writes records to a file while they come."""

from __future__ import annotations

import atexit
import os
import platform
import sys
import threading
from pathlib import Path
from typing import IO, TYPE_CHECKING, Final

from asyncmem.core import log_time_ns
from asyncmem.errors import InvalidRequest
from asyncmem.insight.needs import need_msgspec
from asyncmem.insight.reading import read

if TYPE_CHECKING:
    from collections.abc import Sequence
    from os import PathLike

    import numpy as np
    from numpy.typing import NDArray

    from asyncmem.core import Witness
    from asyncmem.insight.records import Records
    from asyncmem.insight.tap import Tap

_PAUSE: Final = 0.2
"""Seconds between looks for records: what a process that dies may lose."""


class Spool:
    """Writes what some taps give. Made before recording begins, so that what is wrong with the file is said then."""

    def __init__(self, path: str | PathLike[str], *, force: bool) -> None:
        need_msgspec("recording to a file")
        from asyncmem.insight.amem import MAGIC

        self.path = Path(path).absolute()  # which it stays where the program goes elsewhere
        if self.path.is_dir():
            raise InvalidRequest("file", str(path), "the name of a file")
        self._file: IO[bytes] = self.path.open("wb" if force else "xb")
        self._file.write(MAGIC)
        self._writing = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, name="asyncmem records", daemon=True)
        self._known = [1, 1, 1, 1]  # places, sites, tasks and tags that are written
        self._threads: dict[int, str] = {}
        self._pools = 0
        self._error: OSError | None = None
        self._process = os.getpid()

    def run(self, witness: Witness, taps: Sequence[Tap], *, began: int, wall: float, frames: int) -> None:
        """Write the heading, and from now on what the taps give; more of them may come."""
        from asyncmem import __version__
        from asyncmem.insight.amem import VERSION, Heading, pack

        self._witness, self._taps = witness, taps
        heading = Heading(
            version=VERSION, began=began, wall=wall, frames=frames, program=list(sys.orig_argv), process=os.getpid(),
            python=platform.python_version(), asyncmem=__version__,
        )  # fmt: skip
        self._file.write(pack(heading))
        self.drain()
        self._thread.start()
        atexit.register(self.end)

    def end(self) -> None:
        """Write the rest, and end the file; once is enough.

        Raises:
            OSError: What ended the writing early.
        """
        if self._stop.is_set() or os.getpid() != self._process:
            return
        self._stop.set()
        atexit.unregister(self.end)
        if self._thread.is_alive():
            self._thread.join()
        self.drain(last=True)
        self._file.close()
        if self._error is not None:
            raise self._error

    def records(self) -> Records:
        """Answer what has been recorded so far, or all of it."""
        if not self._stop.is_set():
            self.drain()
        return read(self.path)

    def drain(self, *, last: bool = False) -> None:
        """Write what has come since, and hand it to the system. The first error ends all writing."""
        with self._writing:
            if self._error is not None or self._file.closed:
                return
            try:
                for tap in tuple(self._taps):
                    self._write_rows_of(tap)
                if last:
                    self._write_end()
                self._file.flush()
            except OSError as error:
                self._error = error

    def _write_rows_of(self, tap: Tap) -> None:
        from asyncmem.insight.amem import Pool, pack

        if tap.number >= self._pools:
            self._pools += 1
            name, device, limit = tap.name
            self._file.write(pack(Pool(number=tap.number, name=name, device=device, limit=limit)))
            self._write(tap, tap.before)
        for part in tap.parts():
            self._write(tap, part.rows, lost=part.lost, cut=part.cut)

    def _write(self, tap: Tap, rows: NDArray[np.void], *, lost: int = 0, cut: bool = False, held: bool = False) -> None:
        from asyncmem.insight.amem import Rows, pack, pack_rows

        self._write_names()  # behind the rows were taken, so that all that they name is there
        block = Rows(pool=tap.number, count=len(rows), columns=pack_rows(rows), lost=lost, cut=cut, held=held)
        self._file.write(pack(block))

    def _write_names(self) -> None:
        from asyncmem.insight.amem import NewNames, pack

        seen = self._witness
        lists = seen.places, seen.sites, seen.tasks, seen.tags
        ends = [len(one) for one in reversed(lists)][::-1]  # a site's place is there before the site
        threads = {i: name for i, name in enumerate(seen.threads) if name is not None and i not in self._threads}
        if ends == self._known and not threads:
            return
        places, sites, tasks, tags = self._known
        names = NewNames(
            places=seen.places[places : ends[0]], sites=seen.sites[sites : ends[1]],
            tasks=seen.tasks[tasks : ends[2]], tags=seen.tags[tags : ends[3]], threads=threads,
        )  # fmt: skip
        self._file.write(pack(names))
        self._known = ends
        self._threads |= threads

    def _write_end(self) -> None:
        from asyncmem.insight.amem import End, pack

        # Before the rest is read, so that what comes meanwhile is in that.
        held = [(tap, tap.held()) for tap in self._taps]
        for tap, rows in held:
            self._write_rows_of(tap)
            self._write(tap, rows, held=True)
        self._file.write(pack(End(time=log_time_ns())))

    def _work(self) -> None:
        while not self._stop.wait(_PAUSE):
            self.drain()
