"""How bytes of the host get to a buffer of a device: from where they are, or by way of page-locked memory."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from asyncmem.core import Buffer
    from asyncmem.pipeline.crew import Crew
    from asyncmem.pool import AsyncMemoryPool, Copy

Piece: TypeAlias = tuple[int, memoryview]
"""Bytes of the host, and where in a buffer they belong."""

AT_ONCE: Final = 4 << 20
"""Bytes that one thread reads before it looks for more: long beside a call, short beside a batch that many read."""


def holds_up(pool: AsyncMemoryPool, pieces: Sequence[Piece]) -> bool:
    """Tell whether copying these to the device would hold up whoever copies, because they are not page-locked."""
    return any(pool.device.copy_holds_up(source, into=True) for _, source in pieces)


def fill(target: Buffer, pieces: Sequence[Piece]) -> list[Copy]:
    """Start copying pieces to where they belong, each by the buffer's home stream."""
    # A piece is bytes, and so is the part of the buffer that it goes to.
    return [target._copy(source.nbytes, source, None, True, offset) for offset, source in pieces]


def fill_by_way_of(staging: Buffer, target: Buffer, pieces: Sequence[Piece], crew: Crew) -> Copy:
    """Read pieces into a page-locked buffer of the target's size (blocks), and start one copy of the whole.

    The staging buffer is freed; its memory follows when the copy is done.

    Args:
        staging: The page-locked buffer.
        target: Where the pieces belong.
        pieces: What is read.
        crew: Does the reading together, in parts.
    """
    try:
        whole = staging.view("uint8").numpy(np.uint8)
        crew.share([partial(_read, whole, part) for part in parts_of(pieces)])
        del whole  # an export, which would hold the staging buffer
        return target.copy_from(staging)
    finally:
        staging.free()


def parts_of(pieces: Iterable[Piece], nbytes: int = AT_ONCE) -> Iterator[list[Piece]]:
    """Go through pieces in parts of about so many bytes: long pieces are cut, and short ones come together."""
    part: list[Piece] = []
    length = 0
    for offset, source in pieces:
        for at in range(0, source.nbytes, nbytes):
            cut = source[at : at + nbytes]
            part.append((offset + at, cut))
            length += cut.nbytes
            if length >= nbytes:
                yield part
                part, length = [], 0
    if part:
        yield part


def _read(whole: np.ndarray[Any, np.dtype[np.uint8]], part: Sequence[Piece]) -> None:
    for offset, source in part:
        # By numpy, which lets go of the interpreter meanwhile.
        np.copyto(whole[offset : offset + source.nbytes], np.asarray(source))
