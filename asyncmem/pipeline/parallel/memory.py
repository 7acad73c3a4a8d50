"""What the steps of a stage allocate from: what it has stated that they need, and no more."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from asyncmem.core import GRANULE
from asyncmem.errors import Described, InvalidRequest
from asyncmem.figures import format_size
from asyncmem.pool import Budget

if TYPE_CHECKING:
    from asyncmem.core import Buffer
    from asyncmem.devices import Stream
    from asyncmem.pool.share import Share


class StepMemory(Budget):
    """A budget that refuses what is more than was stated. What is only late in coming back, it waits for.

    That is so where freed memory is still exported, as to numpy work on a host stream.
    """

    def __init__(self, parent: Share, stage: str, limit: int) -> None:
        super().__init__(parent, f"{stage}: steps", limit)
        self._stage = stage
        self._given: weakref.WeakSet[Buffer] = weakref.WeakSet()

    async def take(self, nbytes: int, stream: Stream, tag: str | None) -> Buffer:
        """Wait for memory at home on a stream.

        Raises:
            InvalidRequest: With what the steps hold, it is more than was stated.
        """
        if granules(nbytes) > self.room():
            left = self.own_limit() - sum(granules(one.nbytes) for one in self._given if one.alive)
            if granules(nbytes) > left:
                most = f"at most the {format_size(left)} that {self._stage!r} has left"
                raise InvalidRequest(
                    "size", Described(format_size(nbytes)), most, hint="state more as saved or working"
                )
        buffer = await self.allocate_async(nbytes, stream=stream, tag=tag)
        self._given.add(buffer)
        return buffer


def granules(nbytes: int) -> int:
    """Answer the bytes that a buffer of so many is counted as."""
    return -(-nbytes // GRANULE) * GRANULE
