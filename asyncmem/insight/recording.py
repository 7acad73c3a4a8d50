"""`Recording`: pools whose doings are noted down, into a ring in memory or a file."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Final, Self, final

import anyio
import numpy as np
from anyio import to_thread

from asyncmem.core import log_time_ns
from asyncmem.errors import InvalidRequest
from asyncmem.insight import witness as witnesses
from asyncmem.insight.names import Names
from asyncmem.insight.order import ROW, in_order
from asyncmem.insight.records import Records
from asyncmem.insight.tap import Tap
from asyncmem.pool.open_pool import arrivals, open_pools

if TYPE_CHECKING:
    from os import PathLike
    from types import TracebackType

    from asyncmem.core import Witness
    from asyncmem.insight.spool import Spool
    from asyncmem.pool import AsyncMemoryPool
    from asyncmem.pool.open_pool import OpenPool

KEEP: Final = 1 << 18
_CUT: Final = "There was no memory for more records."


@final
class Recording:
    """Records of pools while entered by ``with`` or ``async with``.

    Each allocation and each free is a record, whoever asks: threads, tasks, budgets, batches, finalizers; so is memory
    that comes from the device or goes back, each end of a wait, each change of pressure, and each refusal. A lease is
    one allocation of its whole range until it ends. Buffers without bytes, and those that a fallback placed on the
    host, are left out. Times are the machine's, whatever clock the device has.

    A record costs about a quarter of a microsecond, in which the file is not written. A pool that nobody records pays
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
        self._pools = pools
        self._keep = _whole("keep", keep, 1 << 40)
        self._frames = _whole("frames", frames, 128)
        self._file = file
        self._force = force
        self._taps: list[Tap] = []
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
        return f"<asyncmem.insight.Recording of {', '.join(one.name.name for one in self._taps) or 'no pool'}: {state}>"

    def __enter__(self) -> Self:
        """Begin; a pool that is not open is opened.

        Raises:
            InvalidRequest: This recording was used before.
            PoolClosed: One of the pools is closed.
            FileExistsError: The file is there already.
            ModuleNotFoundError: The file needs the extra `insight`, which is not installed.
        """
        if self._witness is not None:
            raise InvalidRequest("with", self, "a recording that was not used before")
        found = []
        for pool in self._pools:
            pool._open_core()  # raises where it is closed
            found.append(pool._opened)
        if self._file is not None:
            from asyncmem.insight.spool import Spool

            self._spool = Spool(self._file, force=self._force)
        self._witness = witnesses.join(self._frames)
        self._wall, self._began = time.time(), log_time_ns()
        with self._changing:
            if not self._pools:
                arrivals.append(self._add)
                found = open_pools()
            for opened in found:
                self._add(opened)
            if self._spool is not None:
                self._spool.run(self._witness, self._taps, began=self._began, wall=self._wall, frames=self._frames)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End; what was recorded is kept.

        Raises:
            OSError: The file could not be written to its end.
        """
        assert self._witness is not None
        with self._changing:
            if not self._pools:
                arrivals.remove(self._add)
            try:
                if self._spool is not None:
                    self._spool.end()
            finally:
                for tap in self._taps:
                    tap.collect()
                    tap.close()
                self._over, self._ended = True, log_time_ns()
                witnesses.leave(self._witness, self._frames)

    async def __aenter__(self) -> Self:
        """Open the pools without blocking the loop, and begin as ``with`` does. Cancelled: nothing goes on."""
        for pool in self._pools:
            await pool.open()
        return self.__enter__() if self._file is None else await self._enter_on_thread()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End as ``with`` does; a file is written to its end on a thread. Cancelled: it ends all the same."""
        if self._file is None:
            self.__exit__(kind, error, trace)
            return
        with anyio.CancelScope(shield=True):
            await to_thread.run_sync(self.__exit__, kind, error, trace)

    async def _enter_on_thread(self) -> Self:
        first = threading.Lock()  # is taken by whoever is done first, so that the other one ends what has begun

        def enter() -> Self:
            self.__enter__()
            if not first.acquire(blocking=False):
                self.__exit__(None, None, None)
            return self

        try:
            return await to_thread.run_sync(enter)
        except BaseException:  # asyncio's own cancellation does not wait for the thread
            if not first.acquire(blocking=False):
                await self.__aexit__(None, None, None)
            raise

    def records(self) -> Records:
        """Answer what was recorded: all of it, or, while recording goes on, what there is so far.

        Of a file, that is what is in it, which is read each time (blocks).

        Raises:
            InvalidRequest: It has not begun.
        """
        if self._witness is None:
            raise InvalidRequest("records()", self, 'a recording that has begun: "with Recording(pool) as recording"')
        if self._spool is not None:
            return self._spool.records()
        if self._found is not None:
            return self._found
        found = self._read(self._witness)
        if self._over:
            self._found = found
        return found

    def _add(self, opened: OpenPool) -> None:
        assert self._witness is not None
        with self._changing:
            if all(tap.core is not opened.core for tap in self._taps):
                self._taps.append(Tap(opened, len(self._taps), self._witness, self._keep))

    def _read(self, witness: Witness) -> Records:
        held, rows = [np.empty(0, ROW)], [np.empty(0, ROW)]
        with self._changing:
            taps = list(self._taps)
            for tap in taps:
                now = tap.held()  # before the rest, so that what comes meanwhile is in the rows
                tap.collect()
                held += [tap.outline(), now]
                rows.append(tap.kept())
        lost = sum(tap.lost for tap in taps)
        names = Names.of(witness, [tap.name for tap in taps])
        together = in_order(np.concatenate(held), np.concatenate(rows), self._began, lost=lost)
        note = _CUT if any(tap.cut for tap in taps) else ""
        ended = self._ended or log_time_ns()
        return Records(together, names, began=self._began, wall=self._wall, ended=ended, lost=lost, note=note)


def _whole(name: str, value: object, most: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
        raise InvalidRequest(name, value, f"a number from 1 to {most}")
    return value
