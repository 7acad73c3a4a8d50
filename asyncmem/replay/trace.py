"""`Trace`: what a program allocated and freed, in its order; and `record`, which makes one of a running pool."""

from dataclasses import KW_ONLY, dataclass
from os import PathLike
from typing import Final, NamedTuple, Self, final

import numpy as np
from numpy.typing import NDArray

from asyncmem.core import LOG_ROW, Core, Kind, LogPart, log_time_ns
from asyncmem.errors import InvalidRequest
from asyncmem.figures import format_count, format_duration, format_size
from asyncmem.files import naming
from asyncmem.pool import AsyncMemoryPool
from asyncmem.replay.columns import Columns, Op, checked, level, read_npz, write_npz
from asyncmem.text import quoted


class Steps(NamedTuple):
    """What a replay does, in order: contiguous columns of one length for a compiled loop."""

    slot: NDArray[np.int32]
    """Where the loop keeps the block: the number of the allocation, below `Trace.allocations`."""
    nbytes: NDArray[np.int64]
    """What to allocate, -1 to free."""
    stream: NDArray[np.int32]
    """The stream that asks, numbered without gaps: below `Trace.streams`."""
    time_us: NDArray[np.int64]
    """When the program did it, in microseconds since it began."""


@final
@dataclass(frozen=True, eq=False, repr=False)
class Trace:
    """A recording of one device's allocations, checked when it is made.

    One row is one event, one column one property of it; the arrays are contiguous and cannot be written to. Every free
    follows its allocation and comes once, allocations are numbered from 0 in their order, times never decrease.

    Attributes:
        op: What happened, an `Op`; a replay repeats allocations (0) and frees (1), and leaves out the others.
        stream: Number of the stream; 0 is the default stream.
        id: Number of the allocation; -1 where the recorded allocator dealt with the driver.
        nbytes: Bytes as they were asked for; of a free those of its allocation.
        time_us: Microseconds since the recording began.
        name: What tables call it.
        device: Number of the device.
        note: What had to be repaired or is missing, in sentences; empty for a whole recording.

    Raises:
        BadTrace: The rows contradict each other; it names the first that does.
    """

    op: NDArray[np.uint8]
    stream: NDArray[np.uint16]
    id: NDArray[np.int32]
    nbytes: NDArray[np.int64]
    time_us: NDArray[np.int64]
    _: KW_ONLY
    name: str = ""
    device: int = 0
    note: str = ""

    def __post_init__(self) -> None:
        for name, column in checked(self.columns)._asdict().items():
            object.__setattr__(self, name, column)

    def __len__(self) -> int:
        """Count the events."""
        return self.op.size

    def __repr__(self) -> str:
        name = f" {quoted(self.name)}" if self.name else ""
        return (
            f"<asyncmem.replay.Trace{name}: {format_count(self.allocations, 'allocation')} on "
            f"{format_count(self.streams, 'stream')}, at most {format_size(self.peak_requested)} live, "
            f"{format_duration(self.duration)}>"
        )

    @property
    def columns(self) -> Columns:
        """The five columns."""
        return Columns(self.op, self.stream, self.id, self.nbytes, self.time_us)

    @property
    def allocations(self) -> int:
        """How many there are."""
        return int(np.count_nonzero(self.op == Op.ALLOCATE))

    @property
    def streams(self) -> int:
        """How many there are, the default stream among them; their numbers may have gaps."""
        return int(self._places()[-1]) + 1 if len(self) else 0

    @property
    def duration(self) -> float:
        """Seconds from the beginning to the last event."""
        return int(self.time_us[-1]) / 1e6 if len(self) else 0.0

    @property
    def peak_requested(self) -> int:
        """The most bytes that were live at once, as they were asked for: no allocator can reserve less."""
        return int(level(self.columns, Op.ALLOCATE, Op.FREE).max(initial=0))

    @property
    def peak_recorded(self) -> int:
        """The most bytes that the recorded allocator had from the driver; 0 where that was not recorded."""
        return int(level(self.columns, Op.GROW, Op.SHRINK).max(initial=0))

    def steps(self) -> Steps:
        """Return the allocations and frees alone, made for a compiled loop."""
        kept = self.op <= Op.FREE
        nbytes = np.where(self.op == Op.FREE, -1, self.nbytes)
        return Steps(self.id[kept], nbytes[kept], self._places()[self.stream[kept]], self.time_us[kept])

    def row_of(self, step: int) -> int:
        """Return the row of one of the `steps`."""
        return int(np.flatnonzero(self.op <= Op.FREE)[step])

    def _places(self) -> NDArray[np.int32]:
        """Return for each number of a stream which it would be if there were no gaps."""
        there = np.bincount(self.stream, minlength=1) > 0
        there[0] = True
        return np.cumsum(there, dtype=np.int32) - np.int32(1)

    def warmup(self, most: int = 32) -> tuple[tuple[int, int], ...]:
        """Return what was live when the most was: pairs of size and count, for the `warmup` of a pool.

        Args:
            most: How many pairs to return; those that come to the most bytes are, the largest first.
        """
        if not self.allocations:
            return ()
        at = int(level(self.columns, Op.ALLOCATE, Op.FREE).argmax()) + 1
        op, numbers = self.op[:at], self.id[:at]
        taken = numbers[op == Op.ALLOCATE]
        held = np.isin(taken, numbers[op == Op.FREE], invert=True)
        sizes, counts = np.unique(self.nbytes[:at][op == Op.ALLOCATE][held], return_counts=True)
        largest = sorted(zip(sizes.tolist(), counts.tolist(), strict=True), key=lambda one: -one[0] * one[1])
        return tuple((size, count) for size, count in largest[:most] if size)

    def save(self, path: str | PathLike[str]) -> None:
        """Write it to a file, compressed; what was there is replaced. `load` and numpy read it.

        Raises:
            OSError: The file cannot be written.
        """
        write_npz(path, self.columns, name=self.name, device=self.device, note=self.note)

    @classmethod
    def load(cls, path: str | PathLike[str]) -> Self:
        """Read a recording that `save` wrote, or other columns of the same form; `read` knows further kinds of files.

        Raises:
            BadTrace: The file is no recording, is cut off, or contradicts itself.
            OSError: The file cannot be read.
        """
        with naming(path):
            columns, about = read_npz(path)
            return cls(*columns, **about)


_CUT: Final = "The recording ends early: there was no memory for more of it."


def record(pool: AsyncMemoryPool) -> "Recorder":
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
        """Return what was recorded: all of it, or what there is so far.

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
