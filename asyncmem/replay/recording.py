"""`record`: a recording of what a running pool is asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Self, final

import numpy as np

from asyncmem.errors import InvalidRequest
from asyncmem.replay.columns import Op
from asyncmem.replay.trace import Trace

if TYPE_CHECKING:
    from os import PathLike
    from types import TracebackType

    from asyncmem.core import Core, HeapLog
    from asyncmem.pool import AsyncMemoryPool

_FREED: Final = 1
_UNDONE: Final = 2
_CUT: Final = "The recording ends early: there was no memory for more of it."


def record(pool: AsyncMemoryPool) -> Recorder:
    """Make a recorder of a pool, which records what that is asked for while entered by ``with`` or ``async with``.

    Every buffer counts once, whoever asks for it: threads, tasks, budgets, batches and finalizers. A lease is one
    allocation of its whole range until it ends; what is held then counts by itself. Buffers without bytes, and those
    that a fallback placed on the host, are left out. What is live when recording begins is allocated at time 0. Times
    are the machine's, whatever clock the device has.

    A pool that is not recorded pays a branch for it. One that is takes some tens of nanoseconds and 24 bytes more for
    each allocation and each free, until recording ends. Where there is no memory for that, the program goes on, and
    the trace ends there and says so in its note.

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
        self._log: HeapLog | None = None

    def __repr__(self) -> str:
        state = "over" if self._log is not None else "going on" if self._core is not None else "not begun"
        return f"<asyncmem.replay.Recorder of pool {self._pool.name!r}: {state}>"

    def __enter__(self) -> Self:
        """Begin.

        Raises:
            InvalidRequest: The pool is recorded already, or this recorder has been used.
            PoolClosed: The pool is closed.
        """
        flow = self._pool.flow
        if flow.refusing is not None:
            raise flow.refusing
        core = flow.core
        if self._core is not None or not core.begin_log():
            raise InvalidRequest("record()", self._pool, "a pool that is not recorded already, and a new recorder")
        self._core = core
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End; what was recorded is kept."""
        assert self._core is not None
        self._log = self._core.end_log()

    async def __aenter__(self) -> Self:
        """Open the pool without blocking the loop, and begin as ``with`` does."""
        await self._pool.open()
        return self.__enter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End; what was recorded is kept."""
        self.__exit__(kind, error, trace)

    def trace(self) -> Trace:
        """Answer what was recorded: all of it, or, while recording goes on, what there is so far.

        Raises:
            InvalidRequest: It has not begun.
        """
        if self._core is None:
            raise InvalidRequest("trace()", self, 'a recorder that has begun: "with record(pool) as recorder"')
        log = self._core.read_log() if self._log is None else self._log
        number = self._pool.device.name.partition(":")[2]
        return _trace_of(log, name=self._pool.name, device=int(number or 0))

    def save(self, path: str | PathLike[str]) -> None:
        """Write `trace` to a file, which `asyncmem replay` reads; what was there is replaced.

        Raises:
            InvalidRequest: It has not begun.
            OSError: The file cannot be written.
        """
        self.trace().save(path)


def _trace_of(log: HeapLog, *, name: str, device: int) -> Trace:
    what = np.frombuffer(log.what, np.uint8)
    number = np.frombuffer(log.number, np.int32)
    kept = np.ones(int(number.max(initial=-1)) + 1, np.bool_)
    kept[number[what == _UNDONE]] = False
    rows = kept[number]
    return Trace(
        np.where(what[rows] == _FREED, Op.FREE, Op.ALLOCATE),
        np.frombuffer(log.stream, np.uint16)[rows],
        (np.cumsum(kept) - 1)[number[rows]],
        np.frombuffer(log.nbytes, np.int64)[rows],
        np.frombuffer(log.time_us, np.int64)[rows],
        name=name,
        device=device,
        note=_CUT if log.cut else "",
    )
