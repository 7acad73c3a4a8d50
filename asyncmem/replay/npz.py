"""Recordings in files: one compressed numpy array a column, in an archive that numpy and any zip tool open.

An archive has `op` (u8), `stream` (u8 or u16), `id` (i32), `size` (i64, bytes) and `dt_us` (i32 or i64, microseconds
since the row before), each with one element an event. Ours has `meta` too, a text of JSON. Whatever else it has is left
alone. Nothing is unpickled, and the headers are believed only as far as they fit the bytes that are there.
"""

import ast
import json
import re
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from struct import error as StructError  # noqa: N812  # an exception, whatever its module calls it
from typing import IO, Any, Final, TypedDict, Unpack
from zipfile import ZIP_DEFLATED, ZIP_STORED, BadZipFile, ZipFile

import numpy as np
from numpy.typing import NDArray

from asyncmem.errors import BadTrace
from asyncmem.figures import format_size
from asyncmem.replay.columns import LATEST_US, Columns, need_numbers, refuse

MOST_BYTES: Final = 1 << 32
"""What a recording may come to uncompressed: more than 200 million events."""

_VERSION: Final = 1
_MAGIC: Final = b"\x93NUMPY"
_MOST_HEADER: Final = 10_000
_KINDS: Final = re.compile(r"[<>|=]?([iu][1248]|U\d{1,7})")
_TROUBLE: Final = (
    BadZipFile,
    EOFError,
    OSError,
    RuntimeError,
    StructError,
    SyntaxError,
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
    meta = json.dumps({"version": _VERSION, **about})
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
    """Read columns, whose rules nobody has checked yet; a file without `meta` is called by its own name.

    Raises:
        BadTrace: It is no such archive, it is cut off or damaged, a column is missing or no plain array of numbers.
        OSError: The file cannot be opened.
    """
    with Path(path).open("rb") as file, _clearly(), ZipFile(file) as archive:
        total = sum(one.file_size for one in archive.infolist())
        if total > MOST_BYTES:
            raise BadTrace(f"{format_size(total)} uncompressed", f"at most {format_size(MOST_BYTES)}")
        op, stream, number, size, gaps = (_array(archive, one) for one in ("op", "stream", "id", "size", "dt_us"))
        columns = Columns(op, stream, number, size, _times(gaps))
        return columns, _about(archive) if "meta.npy" in archive.namelist() else About(name=Path(path).stem)


@contextmanager
def _clearly() -> Iterator[None]:
    # What zipfile, zlib and numpy raise over a damaged file is many things, none of them meant for the reader.
    try:
        yield
    except BadTrace:
        raise
    except _TROUBLE as error:
        raise BadTrace(f"a damaged file ({error})", "an archive of numpy arrays") from error


def _array(archive: ZipFile, name: str) -> NDArray[Any]:
    if f"{name}.npy" not in archive.namelist():
        raise BadTrace(f"no {name}.npy", "an archive with op, stream, id, size and dt_us")
    member = archive.getinfo(f"{name}.npy")
    if member.flag_bits & 1 or member.compress_type not in {ZIP_STORED, ZIP_DEFLATED}:
        raise BadTrace(f"{name}.npy encrypted or packed in another way", "an archive as numpy writes it")
    with archive.open(member) as file:
        kind, shape = _header(file, name)
        data = file.read()
    wanted = kind.itemsize * (shape[0] if shape else 1)
    if len(data) != wanted:
        raise BadTrace(f"{len(data)} bytes in {name}.npy", f"{wanted}, as its head says")
    return np.frombuffer(data, kind).reshape(shape)


def _header(file: IO[bytes], name: str) -> tuple[np.dtype[Any], tuple[int, ...]]:
    # numpy's own reader would build whatever kind of array the file asks for, of any size.
    magic, version = file.read(len(_MAGIC)), file.read(2)
    length = int.from_bytes(file.read(2 if version == b"\x01\x00" else 4), "little")
    if magic != _MAGIC or length > _MOST_HEADER:
        raise BadTrace(f"{name}.npy with another head", "a numpy array")
    head = ast.literal_eval(file.read(length).decode("latin-1"))
    match head:
        case {"descr": str(kind), "fortran_order": bool(), "shape": () | (int(),) as shape} if _KINDS.fullmatch(kind):
            return np.dtype(kind), shape
    raise BadTrace(f"{name}.npy of another kind", "one whole number a row (and a text for meta)")


def _times(gaps: NDArray[Any]) -> NDArray[np.int64]:
    need_numbers("dt_us", gaps)
    refuse(gaps < 0, "0 or more in dt_us", lambda at: str(gaps[at]))
    # In floating point a sum that is too large stays too large.
    if gaps.sum(dtype=np.float64) >= LATEST_US:
        raise BadTrace("a sum of centuries", "microseconds in dt_us")
    return np.cumsum(gaps, dtype=np.int64)


def _about(archive: ZipFile) -> About:
    match json.loads(str(_array(archive, "meta"))):
        case {"version": int(version)} if version > _VERSION:
            raise BadTrace(f"version {version} of the format", f"version {_VERSION}", hint="a newer asyncmem reads it")
        case {"version": int(), "name": str(name), "device": int(device), "note": str(note)}:
            return About(name=name, device=device, note=note)
    raise BadTrace("another shape", "meta with version, name, device and note")
