"""What two processes say to each other about memory, and what a descriptor is."""

import struct
from enum import IntEnum
from typing import Final

TOKEN: Final = 16
"""Bytes of a process's token, its socket's name."""
KEY: Final = 16
"""Bytes of an export's key."""
DESCRIPTOR: Final = struct.Struct(f"<4s{TOKEN}s{KEY}s")
"""The version, the exporter's token, and the key. Nobody can guess either."""
VERSION: Final = b"\xa5am\x01"

_HEAD: Final = struct.Struct("<BQ")


class Kind(IntEnum):
    """What a message says: the importer's first three, and the exporter's other three."""

    OPEN = ord("O")  # the number of the request; the key follows
    FREE = ord("F")  # the number of the request for what was opened
    CLOSED = ord("C")  # the number of a region or group that is closed, or could not be opened
    OPENED = ord("A")  # the number of the request; JSON follows, and a file where it is the first of its group
    REFUSED = ord("R")  # the number of the request; the reason follows
    DROP = ord("D")  # the number of a region or group that is used no more; it is to be closed


def pack(kind: Kind, number: int, rest: bytes = b"") -> bytes:
    """Return a message."""
    return _HEAD.pack(kind, number) + rest


def unpack(message: bytes) -> tuple[Kind, int, bytes]:
    """Read a message: its kind, its number, and what follows.

    Raises:
        ValueError: It is none.
        struct.error: It is too short.
    """
    kind, number = _HEAD.unpack_from(message)
    return Kind(kind), number, message[_HEAD.size :]
