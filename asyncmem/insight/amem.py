"""Files of records, ``.amem``: a heading, then blocks that are written one after the other and never changed.

A block is its length and its checksum, 4 bytes each with the low one first, and so many bytes of MessagePack: one of
the structures below, which say by `type` which they are. Names come before the records that use them, and once each.
What was written when a process died is all there but for the last block, which may be torn.

Rows are columns of little-endian integers, each compressed by itself. A reader refuses a `VERSION` that it does not
know, and passes over structures and columns that it does not know. It takes no more memory than the file is long times
a constant: a block is in the file as a whole, and has no more rows than bytes.
"""

from __future__ import annotations

import enum
import os
import re
import zlib
from collections.abc import Iterator
from typing import IO, Annotated, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from asyncmem.core import LOG_ROW
from asyncmem.errors import BadTrace
from asyncmem.text import encodable

try:
    import msgspec
except ModuleNotFoundError as missing:
    raise ModuleNotFoundError(
        "a file of records needs msgspec: pip install 'asyncmem[insight]'", name="msgspec"
    ) from missing

MAGIC: Final = b"asyncmem"
VERSION: Final = 1

_HEAD: Final = 8  # bytes before a payload: its length and its checksum
_BEGINNING: Final = re.compile(rb"[\x80-\x8f]\xa4type")
"""How payloads begin: a map of up to 15 entries, the first of which is the type."""
_PART: Final = 1 << 20  # bytes that are searched at a time
_OVERLAP: Final = 16  # bytes that two such parts have in common

Figure: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
"""Nanoseconds, bytes or a count, of which some may be added up."""
Number: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=1 << 16)]
"""A pool's or a thread's, as wide as in rows."""
Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
"""Of names, as wide as their numbers in rows."""


class Heading(msgspec.Struct, tag="heading", frozen=True, kw_only=True):
    """What the file is of: the process as in `Origin`, and the most lines (`frames`) that are kept of each call.

    Times are nanoseconds of the machine's steady clock; `wall` is `began` by the calendar, in seconds since 1970.
    """

    version: int
    began: Figure
    wall: Annotated[float, msgspec.Meta(ge=0, lt=1e11)]
    frames: int
    program: list[str]
    process: int
    python: str
    asyncmem: str
    host: str = ""


class Pool(msgspec.Struct, tag="pool", frozen=True, kw_only=True):
    """A pool from here on; its number is that of its rows."""

    number: int
    name: str
    device: str
    limit: Figure
    options: str = ""


class NewNames(msgspec.Struct, tag="names", frozen=True, kw_only=True):
    """Names that come behind those that came before.

    How many places, sites, tasks and tags came before is in `firsts`, so that what is lost can be told.
    """

    firsts: tuple[Count, Count, Count, Count] | None = None
    places: list[tuple[str, int, str]] = []
    sites: list[tuple[int, int]] = []
    tasks: list[str] = []
    tags: list[str] = []
    threads: dict[Number, str] = {}


class Rows(msgspec.Struct, tag="rows", frozen=True, kw_only=True):
    """Records of one pool.

    Attributes:
        lost: Records of this pool that were dropped so far because writing was slower.
        cut: Whether there was no memory for later ones.
        held: Whether these are what is live where the file ends, and not what has happened.
    """

    pool: Number
    count: Figure
    columns: dict[str, bytes]
    lost: Figure = 0
    cut: bool = False
    held: bool = False


class End(msgspec.Struct, tag="end", frozen=True, kw_only=True):
    """The end of a file that is whole."""

    time: Figure


Block: TypeAlias = Heading | Pool | NewNames | Rows | End
_KNOWN: Final = {kind.__struct_config__.tag for kind in (Heading, Pool, NewNames, Rows, End)}


class _AnyBlock(msgspec.Struct):
    """What all structures have, those of later versions too."""

    type: str


def pack(block: Block) -> bytes:
    """Return a block as it lies in a file."""
    try:
        payload = msgspec.msgpack.encode(block)
    except UnicodeEncodeError:  # a name of a file, say, that is no valid UTF-8
        payload = msgspec.msgpack.encode(_encodable(msgspec.to_builtins(block, builtin_types=(bytes,))))
    return len(payload).to_bytes(4, "little") + zlib.crc32(payload).to_bytes(4, "little") + payload


def _encodable(value: object) -> object:
    match value:
        case str():
            return encodable(value)
        case list() | tuple():
            return [_encodable(one) for one in value]
        case dict():
            return {name: _encodable(one) for name, one in value.items()}
    return value


class Unread(enum.Enum):
    """What stands for parts of a file that were not read: a sentence about each."""

    DAMAGED = "The file is damaged, and parts of it are missing."
    TORN = "The file is damaged: it ends in the middle, and what came after is missing."
    UNKNOWN = "Parts of it are of a newer asyncmem, and were left out."


Unit: TypeAlias = Block | Unread


def unpack(file: IO[bytes]) -> Iterator[Unit]:
    """Return the blocks of a file behind its `MAGIC`, one by one. What is damaged is passed over.

    Raises:
        BadTrace: A whole block says what none can.
    """
    kind_of, decode = (msgspec.msgpack.Decoder(kind).decode for kind in (_AnyBlock, Block))
    at = file.tell()
    while at < (size := os.fstat(file.fileno()).st_size):
        payload = _payload_at(file, at, size)
        if payload is None:
            at = _next_block(file, at + 1, size)
            yield Unread.DAMAGED if at < size else Unread.TORN
            continue
        at += _HEAD
        try:
            block: Unit = decode(payload) if kind_of(payload).type in _KNOWN else Unread.UNKNOWN
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
            raise BadTrace(f"a damaged block at byte {at} ({error})", "blocks of records") from error
        if isinstance(block, Rows) and block.count > len(payload):
            what = f"{block.count:,} records in {len(payload):,} bytes at byte {at}"
            raise BadTrace(what, "as many bytes as records")
        yield block
        at += len(payload)


def _payload_at(file: IO[bytes], at: int, size: int) -> bytes | None:
    """Return the payload of the block that begins there; None where no whole block does."""
    file.seek(at)
    head = file.read(_HEAD)
    length = int.from_bytes(head[:4], "little")
    if at + _HEAD + length > size:  # so that no memory is set aside for it
        return None
    payload = file.read(length)
    return payload if len(payload) == length and zlib.crc32(payload) == int.from_bytes(head[4:], "little") else None


def _next_block(file: IO[bytes], at: int, size: int) -> int:
    """Return where the next whole block begins, not before a place; the file's size where there is none.

    Gives up once it has looked through the file's size of payloads that turned out to be none.
    """
    effort = size
    while at + _HEAD < size and effort > 0:
        file.seek(at)
        part = file.read(_PART)
        for found in _BEGINNING.finditer(part, _HEAD):
            begins = at + found.start() - _HEAD
            if _payload_at(file, begins, size) is not None:
                return begins
            length = int.from_bytes(part[found.start() - _HEAD : found.start() - 4], "little")
            effort -= length if length < size else 1  # of what is too long nothing is read
            if effort <= 0:
                break
        at += max(len(part) - _OVERLAP, 1)
    return size


def pack_rows(rows: NDArray[np.void]) -> dict[str, bytes]:
    """Return the columns of rows of the core's log."""
    return {name: zlib.compress(np.ascontiguousarray(rows[name]).tobytes(), 1) for name, _ in LOG_ROW}


def unpack_rows(block: Rows, into: np.dtype[np.void]) -> NDArray[np.void]:
    """Return the rows of a block; columns that it has not are 0.

    Raises:
        ValueError: A column has more or fewer rows than the block; likewise zlib's error, where it is damaged.
    """
    rows = np.zeros(block.count, into)
    for name, kind in LOG_ROW:
        column = block.columns.get(name)
        if column is not None:
            rows[name] = np.frombuffer(_unpacked(column, block.count * np.dtype(kind).itemsize), kind)
    rows["pool"] = block.pool
    return rows


def _unpacked(column: bytes, nbytes: int) -> bytes:
    # No more than one byte too many is made of what swells.
    found = zlib.decompressobj().decompress(column, nbytes + 1)
    if len(found) != nbytes:
        raise ValueError(f"another number of bytes than {nbytes:,} in a column")
    return found
