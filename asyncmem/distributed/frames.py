"""Frames, which go over a link: a header of fixed size, what describes the rest, and the rest."""

import struct
from typing import Final, NamedTuple

from asyncmem.share.items import MOST_TEXT, ProtocolError

HEADER: Final = struct.Struct("<3sBIQQ")
"""The magic, the kind, the bytes of what describes the rest, and two numbers: of an item, its number and its id."""
MAGIC: Final = b"am\x01"
HELLO, UCX, ITEM, CREDIT, BEAT, FAILED, STOP, LOST = KINDS = range(1, 9)
HELLO_META: Final = struct.Struct("<16sI")
"""A pipeline's token, and the edge; `CONTROL` for the client's connection to a worker."""
CONTROL: Final = 0xFFFFFFFF


class Frame(NamedTuple):
    """A header that has been checked."""

    kind: int
    meta: int
    number: int
    name: int


def pack(kind: int, meta: int = 0, number: int = 0, name: int = 0) -> bytes:
    """Return a header."""
    return HEADER.pack(MAGIC, kind, meta, number, name)


def unpack(header: bytes | bytearray) -> Frame:
    """Read a header.

    Raises:
        ProtocolError: It is none.
    """
    if len(header) != HEADER.size:
        raise ProtocolError(f"a header of {len(header)} bytes")
    magic, kind, meta, number, name = HEADER.unpack(header)
    if magic != MAGIC or kind not in KINDS or meta > MOST_TEXT:
        raise ProtocolError(f"no header of this version: {bytes(header)!r}")
    return Frame(kind, meta, number, name)
