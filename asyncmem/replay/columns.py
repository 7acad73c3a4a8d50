"""What a recording consists of: one row an event, one column a property, and the rules that the rows keep.

A fault is told by the row and the file that it is in, and what should have been there.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import IntEnum
from os import PathLike, fspath
from typing import Any, Final, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from asyncmem.errors import BadTrace
from asyncmem.figures import format_size
from asyncmem.units import MAX_SIZE

_Number = TypeVar("_Number", bound=np.integer)

MOST_STREAMS: Final = 1 << 16
"""More than any program has: stream numbers are dense, so a larger one is none."""

LATEST_US: Final = 1 << 53
"""285 years after the beginning."""


class Op(IntEnum):
    """What an event was. A replay repeats `ALLOCATE` and `FREE`; the others tell how the recorded allocator fared."""

    ALLOCATE = 0
    FREE = 1
    """The program gave it back; the device may still have been at work on it."""
    DONE = 2
    """The recorded allocator noticed that the device was done with it."""
    GROW = 3
    """The recorded allocator took memory from the driver."""
    SHRINK = 4
    """It gave memory back to the driver."""


class Columns(NamedTuple):
    """The events in their order. `settled` makes the arrays what is said here."""

    op: NDArray[np.uint8]
    stream: NDArray[np.uint16]
    """Number of the stream; 0 is the default stream."""
    id: NDArray[np.int32]
    """Number of the allocation, counted from 0 in the order of allocation; -1 for `GROW` and `SHRINK`."""
    nbytes: NDArray[np.int64]
    """Bytes as they were asked for."""
    time_us: NDArray[np.int64]
    """Microseconds since the recording began."""


_ENDS: Final = {"op": len(Op), "stream": MOST_STREAMS, "id": 1 << 31, "nbytes": MAX_SIZE, "time_us": LATEST_US}


def settled(columns: Columns) -> Columns:
    """Answer columns that keep all rules, of the right types, contiguous, and that nobody can write to.

    Raises:
        BadTrace: A rule is broken; it names the first row that does.
    """
    for name, column in columns._asdict().items():
        _check_numbers(name, column, columns.op.size)
    found = Columns(
        _frozen(columns.op, np.uint8),
        _frozen(columns.stream, np.uint16),
        _frozen(columns.id, np.int32),
        _frozen(columns.nbytes, np.int64),
        _frozen(columns.time_us, np.int64),
    )
    _check_order(found)
    _check_lives(found)
    return found


def live_bytes(columns: Columns) -> NDArray[np.int64]:
    """Answer the bytes that were allocated and not freed after each event."""
    return _level(columns, Op.ALLOCATE, Op.FREE)


def reserved_bytes(columns: Columns) -> NDArray[np.int64]:
    """Answer the bytes that the recorded allocator had from the driver after each event."""
    return _level(columns, Op.GROW, Op.SHRINK)


def need_numbers(name: str, column: NDArray[np.generic]) -> None:
    """Raise `BadTrace` unless the column has whole numbers in one dimension."""
    if column.ndim != 1 or column.dtype.kind not in "iu":
        raise BadTrace(f"{column.dtype} in {column.ndim} dimensions", f"whole numbers in {name}, one a row")


def _check_numbers(name: str, column: NDArray[Any], length: int) -> None:
    need_numbers(name, column)
    if column.size != length:
        raise BadTrace(f"{column.size} in {name} and {length} in op", "columns of one length")
    least, end = -1 if name == "id" else 0, _ENDS[name]
    refuse((column < least) | (column >= end), f"{name} from {least} to {end - 1}", lambda at: str(column[at]))


def _frozen(column: NDArray[np.integer], kind: type[_Number]) -> NDArray[_Number]:
    copy = np.array(column, dtype=kind, order="C")
    copy.flags.writeable = False
    return copy


def _level(columns: Columns, up: Op, down: Op) -> NDArray[np.int64]:
    signs = np.zeros(len(Op), np.int64)
    signs[up], signs[down] = 1, -1
    return np.cumsum(signs[columns.op] * columns.nbytes)


def _check_order(columns: Columns) -> None:
    time = columns.time_us
    back = np.zeros(time.size, np.bool_)
    back[1:] = time[1:] < time[:-1]
    refuse(back, "a time not before the last row's", lambda at: f"{time[at]} after {time[at - 1]} µs")


def _check_lives(columns: Columns) -> None:
    op, ids = columns.op, columns.id
    refuse((op >= Op.GROW) & (ids != -1), "id -1 for the allocator's own", lambda at: f"id {ids[at]}")
    born = np.flatnonzero(op == Op.ALLOCATE)
    wrong = ids[born] != np.arange(born.size)
    refuse(wrong, "allocations numbered from 0", lambda at: f"number {ids[born[at]]} for number {at}", born)
    freed = _ends(columns, Op.FREE, born, "a live allocation")
    _ends(columns, Op.DONE, freed, "an allocation whose free was asked for")
    _check_level(live_bytes(columns), "live")
    _check_level(reserved_bytes(columns), "reserved")


def _check_level(level: NDArray[np.int64], what: str) -> None:
    # No step is as large as the bound, so the first one beyond it is seen before the sum could overflow.
    most = format_size(MAX_SIZE)
    refuse(abs(level) > MAX_SIZE, f"at most {most} {what} at once", lambda at: format_size(int(level[at])))


def _ends(columns: Columns, op: Op, begins: NDArray[np.intp], what: str) -> NDArray[np.intp]:
    """Check that what `op` ends had begun, once, and answer the row of each end; the number of rows where none is."""
    never = columns.op.size
    rows = np.flatnonzero(columns.op == op)
    ids = columns.id[rows]
    expected = f"{op.name} of {what}"
    refuse((ids < 0) | (ids >= begins.size), expected, lambda at: f"number {ids[at]} of {begins.size}", rows)
    refuse(begins[ids] > rows, expected, lambda at: f"number {ids[at]}", rows)
    ends = np.full(begins.size, never)
    ends[ids[::-1]] = rows[::-1]  # where a number repeats, its first row is written last
    refuse(ends[ids] != rows, expected, lambda at: f"number {ids[at]}, as in row {ends[ids[at]]}", rows)
    asked, given = columns.nbytes[columns.op == Op.ALLOCATE][ids], columns.nbytes[rows]
    refuse(asked != given, "the bytes of its allocation", lambda at: f"{given[at]} and not {asked[at]}", rows)
    return ends


def refuse(
    wrong: NDArray[np.bool_], expected: str, got: Callable[[int], str], rows: NDArray[np.intp] | None = None
) -> None:
    """Raise for the first that is wrong.

    Args:
        wrong: Says of each row, or of each of `rows`, whether it is wrong.
        expected: What ought to be there.
        got: Tells what is there, by position in `wrong`.
        rows: The rows that `wrong` is about; None for all.

    Raises:
        BadTrace: One is wrong.
    """
    if wrong.any():
        at = int(wrong.argmax())
        raise BadTrace(got(at), expected, row=at if rows is None else int(rows[at]))


@contextmanager
def naming(file: str | PathLike[str]) -> Iterator[None]:
    """Say in which file the fault is that is found inside the block, and call what is too large for memory a fault."""
    try:
        yield
    except BadTrace as fault:
        raise BadTrace(fault.got, fault.expected, file=fspath(file), row=fault.row, hint=fault.hint) from None
    except MemoryError:
        raise BadTrace("more than memory holds", "what fits into memory", file=fspath(file)) from None
