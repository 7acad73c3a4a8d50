"""Files of records, ``.amem``: a heading, then blocks that are written one after the other and never changed.

A block is its length and its checksum, 4 bytes each with the low one first, and so many bytes of MessagePack: one of
the structures below, which say by `type` which they are. Names come before the records that use them, and once each.
What was written when a process died is all there but for the last block, which may be torn.

Rows are columns of little-endian integers, each compressed by itself. A reader refuses a `VERSION` that it does not
know, and passes over structures and columns that it does not know.
"""

from __future__ import annotations

import zlib
from typing import IO, TYPE_CHECKING, Final, TypeAlias

import msgspec
import numpy as np

from asyncmem.core import LOG_ROW

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

MAGIC: Final = b"asyncmem"
VERSION: Final = 1
_MOST: Final = 1 << 30  # bytes of a block


class Heading(msgspec.Struct, tag="heading", frozen=True, kw_only=True):
    """What the file is of. Times are nanoseconds of the machine's steady clock."""

    version: int
    began: int
    wall: float
    """The time at `began` in seconds since 1970."""
    frames: int
    """The most lines that are kept of each call."""
    program: list[str]
    """The command line."""
    process: int
    python: str
    asyncmem: str


class Pool(msgspec.Struct, tag="pool", frozen=True, kw_only=True):
    """A pool from here on; its number is that of its rows."""

    number: int
    name: str
    device: str
    limit: int


class NewNames(msgspec.Struct, tag="names", frozen=True, kw_only=True):
    """Names that come behind those that came before."""

    places: list[tuple[str, int, str]] = []
    sites: list[tuple[int, int]] = []
    tasks: list[str] = []
    tags: list[str] = []
    threads: dict[int, str] = {}


class Rows(msgspec.Struct, tag="rows", frozen=True, kw_only=True):
    """Records of one pool."""

    pool: int
    count: int
    columns: dict[str, bytes]
    lost: int = 0
    """Records of this pool that were dropped so far because writing was slower."""
    cut: bool = False
    """Whether there was no memory for later ones."""
    held: bool = False
    """Whether these are what is live where the file ends, and not what has happened."""


class End(msgspec.Struct, tag="end", frozen=True, kw_only=True):
    """The end of a file that is whole."""

    time: int


Block: TypeAlias = Heading | Pool | NewNames | Rows | End


def pack(block: Block) -> bytes:
    """Answer a block as it lies in a file."""
    payload = msgspec.msgpack.encode(block)
    return len(payload).to_bytes(4, "little") + zlib.crc32(payload).to_bytes(4, "little") + payload


def unpack(file: IO[bytes]) -> Iterator[Block | None]:
    """Go through the blocks of a file behind its `MAGIC`; None stands for a kind of block that is not known.

    Raises:
        EOFError: The rest of the file is no whole block.
    """
    decode = msgspec.msgpack.Decoder(Block).decode
    while head := file.read(8):
        length = int.from_bytes(head[:4], "little")
        payload = file.read(length) if length <= _MOST else b""
        if len(payload) < length or len(head) < 8 or zlib.crc32(payload) != int.from_bytes(head[4:], "little"):
            raise EOFError
        try:
            yield decode(payload)
        except msgspec.DecodeError:
            yield None


def pack_rows(rows: NDArray[np.void]) -> dict[str, bytes]:
    """Answer the columns of rows of the core's log."""
    return {name: zlib.compress(np.ascontiguousarray(rows[name]).tobytes(), 1) for name in LOG_ROW.names or ()}


def unpack_rows(block: Rows, into: np.dtype[np.void]) -> NDArray[np.void]:
    """Answer the rows of a block; columns that it has not are 0.

    Raises:
        ValueError: A column has more or fewer rows than the block; likewise zlib's error and others, where it is
            damaged.
    """
    rows = np.zeros(block.count, into)
    for name in LOG_ROW.names or ():
        column = block.columns.get(name)
        if column is not None:
            rows[name] = np.frombuffer(zlib.decompress(column), LOG_ROW[name])
    rows["pool"] = block.pool
    return rows
