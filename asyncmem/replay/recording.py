"""`record`: a recording of what a running pool is asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Self, final

import numpy as np

from asyncmem.core import LOG_ROW, Kind, log_time_ns
from asyncmem.errors import InvalidRequest
from asyncmem.replay.columns import Op
from asyncmem.replay.trace import Trace
from asyncmem.text import quoted

if TYPE_CHECKING:
    from os import PathLike

    from numpy.typing import NDArray

    from asyncmem.core import Core, LogPart
    from asyncmem.pool import AsyncMemoryPool

_CUT: Final = "The recording ends early: there was no memory for more of it."


def record(pool: AsyncMemoryPool) -> Recorder:
    """Make a recorder of a pool, which records what that is asked for while entered by ``with`` or ``async with``.

    Every buffer counts once, from any caller: threads, tasks, budgets, batches and finalizers. A lease is one
    allocation of its whole range until it ends; what is held then counts by itself. Buffers without bytes, and those
    that a fallback placed on the host, are left out. What is live when recording begins is allocated at time 0. Times
    are the machine's, whatever clock the device has.

    A pool that is not recorded pays a branch for it. One that is takes some tens of nanoseconds and 56 bytes more for
    each allocation and each free, until recording ends. Where there is no memory for that, the program goes on, and
    the trace ends there and says so in its note. Several may record a pool at once.

    Args:
        pool: What to record; the block opens it if it is not open yet.
    """
    return Recorder(pool)


@final
class Recorder:
    """What a pool was asked for between the two ends of a block. Made by `record`; any thread may read it."""

    def __init__(self, pool: AsyncMemoryPool) -> None:
        self._pool = pool
        self._core: Core | None = None
        self._reader = self._began = 0
        self._held = b""  # what was live at the beginning
        self._log: LogPart | None = None

    def __repr__(self) -> str:
        state = "over" if self._log is not None else "going on" if self._core is not None else "not begun"
        return f"<asyncmem.replay.Recorder of pool {quoted(self._pool.name)}: {state}>"

    def __enter__(self) -> Self:
        """Begin.

        Raises:
            InvalidRequest: This recorder has been used.
            PoolClosed: The pool is closed.
        """
        core = self._pool._open_core()
        if self._core is not None:
            raise InvalidRequest("record()", self, "a new recorder")
        self._core = core
        self._began = log_time_ns()
        self._reader, self._held = self._core.open_log()
        return self

    def __exit__(self, *_: object) -> None:
        """End; what was recorded is kept."""
        assert self._core is not None
        self._log = self._core.read_log(self._reader)
        self._core.close_log(self._reader)

    async def __aenter__(self) -> Self:
        """Open the pool without blocking the loop, and begin as ``with`` does."""
        await self._pool.open()
        return self.__enter__()

    async def __aexit__(self, *_: object) -> None:
        """End; what was recorded is kept."""
        self.__exit__()

    def trace(self) -> Trace:
        """Return what was recorded: all of it, or, while recording goes on, what there is so far.

        Raises:
            InvalidRequest: It has not begun.
        """
        if self._core is None:
            raise InvalidRequest("trace()", self, 'a recorder that has begun: "with record(pool) as recorder"')
        log = self._core.read_log(self._reader) if self._log is None else self._log
        before, rows = np.frombuffer(self._held, LOG_ROW).copy(), np.frombuffer(log.rows, LOG_ROW)
        before["time_ns"] = self._began
        rows = np.concatenate((before, rows[rows["kind"] <= Kind.UNDONE]))
        rows = rows[~np.isin(rows["number"], rows["number"][rows["kind"] == Kind.UNDONE])]
        note = _CUT if log.cut else ""
        return trace_of(rows, self._began, name=self._pool.name, device=self._pool.device.name, note=note)

    def save(self, path: str | PathLike[str]) -> None:
        """Write `trace` to a file, which `asyncmem replay` reads; what was there is replaced.

        Raises:
            InvalidRequest: It has not begun.
            OSError: The file cannot be written.
        """
        self.trace().save(path)


def trace_of(rows: NDArray[np.void], began: int, *, name: str, device: str, note: str) -> Trace:
    """Make a trace of one pool's allocations and frees, in their order.

    Args:
        rows: Of the core's log: what was allocated, was there before, or was freed, and each once.
        began: When recording began, by the same clock.
        name: What tables call it.
        device: The name of the pool's device.
        note: What is missing.
    """
    _, first, place = np.unique(rows["number"], return_index=True, return_inverse=True)
    return Trace(
        np.where(rows["kind"] == Kind.FREED, Op.FREE, Op.ALLOCATE),
        rows["stream"],
        np.argsort(np.argsort(first))[place].astype(np.int32),
        rows["nbytes"].astype(np.int64),
        (rows["time_ns"] - began) // 1000,
        name=name,
        device=int(device.partition(":")[2] or 0),
        note=note,
    )
