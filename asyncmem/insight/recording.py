"""`Recording`: records of pools, into a ring in memory or a file; and `read`, which takes them from a file."""

from __future__ import annotations

import threading
import time
from functools import partial
from os import PathLike
from typing import TYPE_CHECKING, Final, Self, TypeAlias

import anyio
import numpy as np
from anyio import to_thread

from asyncmem.core import Witness, log_time_ns
from asyncmem.errors import InvalidRequest
from asyncmem.insight.names import Names, Origin, join_witness, leave_witness
from asyncmem.insight.records import Records
from asyncmem.insight.rows import CUT, MOST_FRAMES, ROW, RecordedPool, in_order
from asyncmem.pool.alarm import alarm
from asyncmem.pool.handles import Handle
from asyncmem.pool.open_pool import OpenPool, arrivals, open_pools
from asyncmem.pool.share import Share
from asyncmem.pool.worker import call_aside
from asyncmem.text import printable
from asyncmem.units import parse_count

if TYPE_CHECKING:
    from asyncmem.insight.spool import Spool
    from asyncmem.pool import AsyncMemoryPool

KEEP: Final = 1 << 18


class Recording(Handle):
    """Records of pools while entered by ``with`` or ``async with``.

    Each allocation and each free is a record, from all callers (threads, tasks, budgets, finalizers); so is memory
    that comes from the device or goes back, each end of a wait, each change of pressure, and each refusal. A lease is
    one allocation of its whole range until it ends. Buffers without bytes, and those that a fallback placed on the
    host, are left out. Times are the machine's, whatever clock the device has.

    A record costs about a quarter of a microsecond, in which the file is not written. A pool that is not recorded pays
    nothing. Any thread may ask for `records()` at any time.

    Args:
        pools: What to record; all of the process for none, those that open later as well.
        keep: Without a file, so many of the newest records are kept for each pool, 56 bytes each.
        file: Where to write all of them, for `read` and the commands. Needs the extra `insight`. It is written by a
            thread every fifth of a second, and can be read up to there if the process dies.
        frames: How many lines of the call are kept of each request, from the innermost outside of asyncmem outwards.
        force: Whether to write over a file that exists.
    """

    def __init__(
        self,
        *pools: AsyncMemoryPool,
        keep: int = KEEP,
        file: str | PathLike[str] | None = None,
        frames: int = 1,
        force: bool = False,
    ) -> None:
        for pool in pools:
            if not isinstance(pool, Share):
                raise InvalidRequest("pools", pool, "a pool")
        self._pools = pools
        self._keep = parse_count(keep, what="keep", least=1, most=1 << 40)
        self._frames = parse_count(frames, what="frames", least=1, most=MOST_FRAMES)
        self._file = file
        self._force = force
        self._recorded: list[RecordedPool] = []
        self._changing = threading.RLock()
        self._witness: Witness | None = None
        self._spool: Spool | None = None
        self._over = False
        self._found: Records | None = None
        self._began = 0
        self._wall = 0.0
        self._ended = 0

    def __repr__(self) -> str:
        state = "over" if self._over else "going on" if self._witness is not None else "not begun"
        names = ", ".join(printable(one.name.name) for one in self._recorded)
        return f"<asyncmem.insight.{type(self).__name__} of {names or 'no pool'}: {state}>"

    def _repr_mimebundle_(self, **wanted: object) -> dict[str, str]:
        """Return what a notebook shows: the pictures, and a summary as text."""
        return {"text/plain": repr(self)} if self._witness is None else self.records()._repr_mimebundle_(**wanted)

    def __enter__(self) -> Self:
        """Begin; a pool that is not open is opened.

        Raises:
            InvalidRequest: This recording was used before.
            PoolClosed: One of the pools is closed.
            FileExistsError: The file is there already.
            ModuleNotFoundError: The file needs the extra `insight`, which is not installed.
        """
        if self._witness is not None or self._over:
            raise InvalidRequest("with", self, "a recording that was not used before")
        found = []
        for pool in self._pools:
            pool._open_core()  # raises where it is closed
            found.append(pool._opened)
        try:
            call_aside(partial(self._begin, found))
        except BaseException as error:
            if not isinstance(error, Exception):  # an interrupt, whatever has begun by now
                self._end(error)
            raise
        return self

    def _begin(self, found: list[OpenPool]) -> None:
        with self._changing:
            if self._over:  # an interrupt has ended the wait for this
                return
            if self._file is not None:
                from asyncmem.insight.spool import Spool

                self._spool = Spool(self._file, force=self._force)
            self._witness = join_witness(self._frames)
            self._wall, self._began = time.time(), log_time_ns()
            if not self._pools:
                arrivals.append(self._add)
                found = open_pools()
            for opened in found:
                self._add(opened)
            if self._spool is not None:
                self._spool.run(self._witness, self._recorded, began=self._began, wall=self._wall, frames=self._frames)

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        """End; what was recorded is kept.

        Raises:
            OSError: The file could not be written to its end; where the block has raised, only a warning says so.
        """
        assert self._witness is not None
        try:
            self._end(error)
        except BaseException as interrupt:
            if not isinstance(interrupt, Exception):  # it may have come first
                self._end(error)
            raise

    def _end(self, error: object) -> None:
        call_aside(partial(self._end_once, error))

    def _end_once(self, error: object) -> None:
        with self._changing:
            if self._over:
                return
            if self._witness is None:  # and never begins any more
                self._over = True
                return
            if not self._pools:
                arrivals.remove(self._add)
            try:
                if self._spool is not None:
                    self._spool.end()
            except (OSError, MemoryError) as trouble:
                if error is None:
                    raise
                alarm(f"the recording {self._file} could not be written to its end: {trouble}", RuntimeWarning)
            finally:
                for one in self._recorded:
                    one.collect()
                    one.close()
                self._over, self._ended = True, log_time_ns()
                leave_witness(self._witness, self._frames)

    async def __aenter__(self) -> Self:
        """Open the pools without blocking the loop, and begin as ``with`` does. Cancelled: nothing is recorded."""
        for pool in self._pools:
            await pool.open()
        return self.__enter__() if self._file is None else await self._enter_on_thread()

    async def __aexit__(self, kind: object, error: object, trace: object) -> None:
        """End as ``with`` does; a file is written to its end on a thread. Cancelled: it ends all the same."""
        if self._file is None:
            self.__exit__(kind, error, trace)
            return
        with anyio.CancelScope(shield=True):
            await to_thread.run_sync(self.__exit__, kind, error, trace)

    async def _enter_on_thread(self) -> Self:
        first = threading.Lock()  # is taken by the first to be done, so that the other one ends what has begun

        def enter() -> None:
            self.__enter__()
            if not first.acquire(blocking=False):
                self.__exit__(None, None, None)

        try:
            await to_thread.run_sync(enter)
        except BaseException:  # asyncio's own cancellation does not wait for the thread
            if not first.acquire(blocking=False):
                await self.__aexit__(None, None, None)
            raise
        return self

    def records(self) -> Records:
        """Return what was recorded: all of it, or what there is so far.

        Of a file, that is what is in it, which is read each time (blocks).

        Raises:
            InvalidRequest: It has not begun.
        """
        witness = self._need_begun()
        if self._spool is not None:
            return self._spool.records()
        if self._found is not None:
            return self._found
        found = self._read(witness)
        if self._over:
            self._found = found
        return found

    def _need_begun(self) -> Witness:
        if self._witness is None:
            name = type(self).__name__
            raise InvalidRequest("with", self, f'a {name} that has begun: "with {name}(pool) as found"')
        return self._witness

    def _add(self, opened: OpenPool) -> None:
        assert self._witness is not None
        with self._changing:
            if all(one.core is not opened.core for one in self._recorded):
                self._recorded.append(RecordedPool(opened, len(self._recorded), self._witness, self._keep))

    def _read(self, witness: Witness) -> Records:
        held, rows = [np.empty(0, ROW)], [np.empty(0, ROW)]
        with self._changing:
            pools = list(self._recorded)
            for pool in pools:
                now = pool.held()  # before the rest, so that what comes meanwhile is in the rows
                pool.collect()
                held += [pool.outline(), now]
                rows.append(pool.kept())
        lost = sum(pool.lost for pool in pools)
        names = Names.of(witness, [pool.name for pool in pools])
        together = in_order(np.concatenate(held), np.concatenate(rows), self._began, lost=lost)
        note = CUT if any(pool.cut for pool in pools) else ""
        ended = self._ended or log_time_ns()
        return Records(
            together, names, began=self._began, wall=self._wall, ended=ended, lost=lost, note=note,
            origin=Origin.of_this_process(),
        )  # fmt: skip


def read(path: str | PathLike[str]) -> Records:
    """Read a file of records, ``.amem``.

    Of a file whose process died, or that is damaged, all blocks that are whole are read; `Records.note` says what is
    missing. What was freed in a damaged part counts as freed; where the end is missing, `Records.end_known` is False.

    Raises:
        BadTrace: It is no such file, or of a version that this asyncmem does not know.
        ModuleNotFoundError: The extra `insight` is not installed.
        OSError: It cannot be read.
    """
    from asyncmem.insight.reading import read_file

    return read_file(path)


Source: TypeAlias = Records | Recording

_background = threading.Lock()
_recording: Recording | None = None


def set_memory_debug(on: bool, *, frames: int = 8) -> None:
    """Begin or end recording all pools of the process in the background.

    Meanwhile out-of-memory errors and the warning of a pool that is closed under its buffers name the lines that hold
    most, and `dump_allocation_trace` and `analyze_allocation_patterns` need no argument. Ended, what was recorded is
    gone; beginning twice goes on with the first.

    Args:
        on: Whether to record.
        frames: How many lines of the call are kept of each request.
    """
    global _recording  # noqa: PLW0603 -- one a process
    with _background:
        if on and _recording is None:
            recording = Recording(frames=frames)
            recording.__enter__()
            _recording = recording
        elif not on and _recording is not None:
            ending, _recording = _recording, None
            ending.__exit__(None, None, None)


def memory_debug() -> Recording | None:
    """Return the recording in the background, None without one."""
    return _recording


def records_of(source: Source | None) -> Records:
    """Return the records of a recording, profile or tracker, or those of the background.

    Raises:
        InvalidRequest: There is no source, and nothing records in the background.
    """
    if isinstance(source, Records):
        return source
    found = _recording if source is None else source
    if not isinstance(found, Recording):
        hint = (
            "call set_memory_debug(True) before, or give a recording, a profile, a tracker, or what read(path) returns"
        )
        raise InvalidRequest("source", source, "something that has records", hint=hint)
    return found.records()
