"""`Spool`: the thread that writes records to a file while a program runs."""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from asyncmem.core import Witness, log_time_ns
from asyncmem.errors import InvalidRequest
from asyncmem.insight.amem import MAGIC, VERSION, End, Heading, NewNames, Pool, Rows, pack, pack_rows
from asyncmem.insight.names import Origin
from asyncmem.insight.reading import read_file
from asyncmem.insight.records import Records
from asyncmem.insight.rows import RecordedPool
from asyncmem.pool.appended import AppendedFile

_PAUSE: Final = 0.2
"""Seconds between looks for records: what a process that dies may lose."""


class Spool:
    """Writes the rows of recorded pools. Made before recording begins, so that errors of the file are raised then."""

    def __init__(self, path: str | PathLike[str], *, force: bool) -> None:
        self.path = Path(path).absolute()  # which it stays where the program goes elsewhere
        if self.path.is_dir():
            raise InvalidRequest("file", str(path), "the name of a file")
        try:
            self._file = AppendedFile(self.path, "wb" if force else "xb")
        except ValueError as error:
            raise InvalidRequest("file", str(path), "a name that a file can have") from error
        self._start = MAGIC
        self._writing = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, name="asyncmem records", daemon=True)
        self._known = (1, 1, 1, 1)  # places, sites, tasks and tags that are written
        self._threads: set[int] = set()
        self._pools = 0
        self._error: OSError | MemoryError | None = None
        self._process = os.getpid()

    def run(self, witness: Witness, recorded: Sequence[RecordedPool], *, began: int, wall: float, frames: int) -> None:
        """Write the heading, and from now on the rows of the pools; more of them may come."""
        self._witness, self._recorded = witness, recorded
        origin = Origin.of_this_process()._asdict() | {"program": list(sys.orig_argv)}
        self._start += pack(Heading(version=VERSION, began=began, wall=wall, frames=frames, **origin))
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
        """Return what has been recorded so far, or all of it."""
        if not self._stop.is_set():
            self.drain()
        return read_file(self.path)

    def drain(self, *, last: bool = False) -> None:
        """Write what has come since, and hand it to the system. The first error ends all writing."""
        with self._writing:
            if self._error is not None or self._file.closed:
                return
            try:
                self._file.write(self._start)
                self._start = b""
                for pool in tuple(self._recorded):
                    self._write_rows_of(pool)
                if last:
                    self._write_end()
            except (OSError, MemoryError) as error:
                self._error = error

    def _write_rows_of(self, pool: RecordedPool) -> None:
        if pool.number >= self._pools:
            self._pools += 1
            self._file.write(pack(Pool(number=pool.number, **pool.name._asdict())))
            self._write(pool, pool.before)
        for part in pool.parts():
            self._write(pool, part.rows, lost=part.lost, cut=part.cut)

    def _write(
        self, pool: RecordedPool, rows: NDArray[np.void], *, lost: int = 0, cut: bool = False, held: bool = False
    ) -> None:
        self._write_names()  # behind the rows were taken, so that all that they name is there
        block = Rows(pool=pool.number, count=len(rows), columns=pack_rows(rows), lost=lost, cut=cut, held=held)
        self._file.write(pack(block))

    def _write_names(self) -> None:
        seen = self._witness
        tags_end, tasks_end, sites_end = len(seen.tags), len(seen.tasks), len(seen.sites)
        places_end = len(seen.places)  # after the sites: a site's place is there before the site
        ends = places_end, sites_end, tasks_end, tags_end
        threads = {i: name for i, name in enumerate(seen.threads) if name is not None and i not in self._threads}
        if ends == self._known and not threads:
            return
        places, sites, tasks, tags = self._known
        names = NewNames(
            places=seen.places[places:places_end], sites=seen.sites[sites:sites_end],
            tasks=seen.tasks[tasks:tasks_end], tags=seen.tags[tags:tags_end], threads=threads, firsts=self._known,
        )  # fmt: skip
        self._file.write(pack(names))
        self._known = ends
        self._threads |= threads.keys()

    def _write_end(self) -> None:
        # Before the rest is read, so that what comes meanwhile is in that.
        held = [(pool, pool.held()) for pool in self._recorded]
        for pool, rows in held:
            self._write_rows_of(pool)
            self._write(pool, rows, held=True)
        self._file.write(pack(End(time=log_time_ns())))

    def _work(self) -> None:
        while not self._stop.wait(_PAUSE):
            self.drain()
