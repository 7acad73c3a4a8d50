"""What a recording consists of: one row an event, one column a property, the rules that the rows keep, and its file.

A fault is told by the row and the file that it is in, and what should have been there.

A file has one compressed numpy array a column, in an archive that numpy and any zip tool open: `op` (u8), `stream` (u8
or u16), `id` (i32), `size` (i64, bytes) and `dt_us` (i32 or i64, microseconds since the row before), each with one
element an event. Ours has `meta` too, a text of JSON. Whatever else it has is left alone. Nothing is unpickled, and the
headers are believed only as far as they fit the bytes that are there: a file that says to have more rows than so many
bytes can hold is refused before anything is unpacked.
"""

import os
import re
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import IntEnum
from os import PathLike
from pathlib import Path
from struct import error as StructError  # noqa: N812  # an exception, whatever its module calls it
from typing import IO, Any, Final, NamedTuple, TypedDict, Unpack
from zipfile import ZIP_DEFLATED, ZIP_STORED, BadZipFile, ZipFile

import numpy as np
from numpy.typing import NDArray

from asyncmem.errors import BadTrace
from asyncmem.figures import format_size
from asyncmem.files import open_file, parse_json
from asyncmem.text import to_json
from asyncmem.units import MAX_SIZE

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
    """The events in their order. `checked` makes the arrays what is said here."""

    op: NDArray[np.uint8]
    stream: NDArray[np.uint16]
    """Number of the stream; 0 is the default stream."""
    id: NDArray[np.int32]
    """Number of the allocation, counted from 0 in the order of allocation; -1 for `GROW` and `SHRINK`."""
    nbytes: NDArray[np.int64]
    """Bytes as they were asked for."""
    time_us: NDArray[np.int64]
    """Microseconds since the recording began."""


_RULES: Final = {
    "op": (np.uint8, 0, len(Op)),
    "stream": (np.uint16, 0, MOST_STREAMS),
    "id": (np.int32, -1, 1 << 31),
    "nbytes": (np.int64, 0, MAX_SIZE),
    "time_us": (np.int64, 0, LATEST_US),
}
"""The type of each column, its least number, and the first that is too large."""


def checked(columns: Columns) -> Columns:
    """Return columns that keep all rules, of the right types, contiguous, and read-only.

    Raises:
        BadTrace: A rule is broken; it names the first row that does.
    """
    found: list[NDArray[Any]] = []
    for name, column in columns._asdict().items():
        kind, least, end = _RULES[name]
        need_numbers(name, column)
        if column.size != columns.op.size:
            raise BadTrace(f"{column.size} in {name} and {columns.op.size} in op", "columns of one length")
        refuse((column < least) | (column >= end), f"{name} from {least} to {end - 1}", lambda at: str(column[at]))  # noqa: B023 - called at once
        found.append(np.array(column, dtype=kind, order="C"))
        found[-1].flags.writeable = False
    frozen = Columns(*found)
    _check_order(frozen)
    _check_lives(frozen)
    return frozen


def level(columns: Columns, up: Op, down: Op) -> NDArray[np.int64]:
    """Return the bytes after each event that one operation has added and another has taken off."""
    signs = np.zeros(len(Op), np.int64)
    signs[up], signs[down] = 1, -1
    return np.cumsum(signs[columns.op] * columns.nbytes)


def need_numbers(name: str, column: NDArray[np.generic]) -> None:
    """Raise `BadTrace` unless the column has whole numbers in one dimension."""
    if not isinstance(column, np.ndarray):
        raise BadTrace(type(column).__name__, f"an array of numpy as {name}")
    if column.ndim != 1 or column.dtype.kind not in "iu":
        raise BadTrace(f"{column.dtype} in {column.ndim} dimensions", f"whole numbers in {name}, one a row")


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
    # No step is as large as the bound, so the first one beyond it is seen before the sum could overflow.
    for what, up, down in (("live", Op.ALLOCATE, Op.FREE), ("reserved", Op.GROW, Op.SHRINK)):
        held, most = level(columns, up, down), format_size(MAX_SIZE)
        expected = f"at most {most} {what} at once"
        refuse(abs(held) > MAX_SIZE, expected, lambda at: format_size(int(held[at])))  # noqa: B023 - called at once


def _ends(columns: Columns, op: Op, begins: NDArray[np.intp], what: str) -> NDArray[np.intp]:
    """Check that what `op` ends had begun, once, and return the row of each end; the number of rows where none is."""
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


_VERSION: Final = 1
_MAGIC: Final = b"\x93NUMPY"
_MOST_HEADER: Final = 10_000
_ROWS_A_BYTE: Final = 2
"""The numbers of allocations alone take 0.7 bytes a row where nothing else ever changes."""
_MOST_TEXT: Final = 1 << 20  # bytes
_MOST_DEVICES: Final = 1 << 16
_HEAD: Final = re.compile(
    rb"\{'descr': '(?P<kind>[<>|=]?(?:[iu][1248]|U\d{1,7}))', 'fortran_order': (?:True|False), "
    rb"'shape': \((?:(?P<rows>\d{1,19}),)?\),? ?\}\s*"
)
_TROUBLE: Final = (
    BadZipFile,
    EOFError,
    OSError,
    RuntimeError,
    StructError,
    TypeError,
    ValueError,
    zlib.error,
)


class About(TypedDict, total=False):
    """What a file says of its recording beside the events."""

    name: str
    device: int
    note: str


def write_npz(path: str | PathLike[str], columns: Columns, **about: Unpack[About]) -> None:
    """Write columns that keep the rules of `Trace`."""
    meta = to_json({"version": _VERSION, **about})
    gaps = np.diff(columns.time_us, prepend=0)
    with Path(path).open("wb") as file:
        np.savez_compressed(
            file,
            op=columns.op,
            stream=columns.stream.astype(np.uint8) if columns.stream.max(initial=0) < 1 << 8 else columns.stream,
            id=columns.id,
            size=columns.nbytes,
            dt_us=gaps.astype(np.int32) if gaps.max(initial=0) < 1 << 31 else gaps,
            meta=np.array(meta),
        )


def read_npz(path: str | PathLike[str]) -> tuple[Columns, About]:
    """Read columns, whose rules are not yet checked; a file without `meta` is called by its own name.

    Raises:
        BadTrace: It is no such archive, it is cut off or damaged, a column is missing or no plain array of numbers.
        OSError: The file cannot be opened.
    """
    with open_file(path) as file, _clearly(), ZipFile(file) as archive:
        most = _ROWS_A_BYTE * os.fstat(file.fileno()).st_size
        op, stream, number, size, gaps = (_array(archive, one, most) for one in ("op", "stream", "id", "size", "dt_us"))
        columns = Columns(op, stream, number, size, _times(gaps))
        if "meta.npy" in archive.namelist():
            return columns, _about(_array(archive, "meta", 1))
        return columns, About(name=Path(path).stem)


@contextmanager
def _clearly() -> Iterator[None]:
    # What zipfile, zlib and numpy raise over a damaged file is many things, none of them meant for the reader.
    try:
        yield
    except BadTrace:
        raise
    except _TROUBLE as error:
        raise BadTrace(f"a damaged file ({error})", "an archive of numpy arrays") from error


def _array(archive: ZipFile, name: str, most: int) -> NDArray[Any]:
    if f"{name}.npy" not in archive.namelist():
        raise BadTrace(f"no {name}.npy", "an archive with op, stream, id, size and dt_us")
    member = archive.getinfo(f"{name}.npy")
    if member.flag_bits & 1 or member.compress_type not in {ZIP_STORED, ZIP_DEFLATED}:
        raise BadTrace(f"{name}.npy encrypted or packed in another way", "an archive as numpy writes it")
    with archive.open(member) as file:
        kind, shape = _header(file, name)
        rows = shape[0] if shape else 1
        if not 0 <= rows <= most or kind.itemsize > _MOST_TEXT:
            raise BadTrace(f"{rows} rows of {kind} in {name}.npy", f"at most {most}, which a file of its size may have")
        data = file.read(rows * kind.itemsize + 1)
    if len(data) != rows * kind.itemsize:
        raise BadTrace(f"{len(data)} bytes or more in {name}.npy", f"{rows * kind.itemsize}, as its head says")
    return np.frombuffer(data, kind).reshape(shape)


def _header(file: IO[bytes], name: str) -> tuple[np.dtype[Any], tuple[int, ...]]:
    # numpy's own reader would build whatever kind of array the file asks for, of any size.
    magic, version = file.read(len(_MAGIC)), file.read(2)
    length = int.from_bytes(file.read(2 if version == b"\x01\x00" else 4), "little")
    if magic != _MAGIC or length > _MOST_HEADER:
        raise BadTrace(f"{name}.npy with another head", "a numpy array")
    head = _HEAD.fullmatch(file.read(length))
    if head is None:
        raise BadTrace(f"{name}.npy of another kind", "one whole number a row (and a text for meta)")
    return np.dtype(head["kind"].decode()), (int(head["rows"]),) if head["rows"] else ()


def _times(gaps: NDArray[Any]) -> NDArray[np.int64]:
    need_numbers("dt_us", gaps)
    refuse(gaps < 0, "0 or more in dt_us", lambda at: str(gaps[at]))
    # In floating point a sum that is too large stays too large.
    if gaps.sum(dtype=np.float64) >= LATEST_US:
        raise BadTrace("a sum of centuries", "microseconds in dt_us")
    return np.cumsum(gaps, dtype=np.int64)


def _about(meta: NDArray[Any]) -> About:
    # numpy would make text of characters that there are not, which breaks whatever looks at it.
    coding = "utf-32-be" if meta.dtype.str.startswith(">") else "utf-32-le"
    match parse_json(meta.tobytes().decode(coding).rstrip("\0")):
        case {"version": int(version)} if version > _VERSION:
            raise BadTrace(f"version {version} of the format", f"version {_VERSION}", hint="a newer asyncmem reads it")
        case {"version": int(), "name": str(name), "device": int(device), "note": str(note)} if (
            0 <= device < _MOST_DEVICES
        ):
            return About(name=name, device=device, note=note)
    raise BadTrace("another shape", "meta with version, name, device and note")
