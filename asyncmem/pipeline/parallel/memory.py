"""Where a stage's memory lies: a range for each thing that its schedule keeps, so that nothing else can break it up."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Literal, TypeAlias, get_args

import anyio

from asyncmem.core import GRANULE
from asyncmem.errors import Described, InvalidRequest
from asyncmem.figures import format_size
from asyncmem.pipeline.parallel.items import buffers
from asyncmem.pipeline.parcels import buffers_in
from asyncmem.pipeline.share import Region

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from asyncmem.core import Buffer
    from asyncmem.devices import Stream
    from asyncmem.pool import Lease

Use: TypeAlias = Literal["saved", "output", "working"]
"""Which of the sizes that a stage states an allocation counts against."""


class Place:
    """A range of memory for one thing at a time, which may be in several buffers.

    Whoever has it next finds it free and in one piece. So as long as none of its buffers is freed before the last one
    is allocated, they fit, whatever their sizes are.

    Attributes:
        nbytes: The length of the range.
        peak: The most bytes of it that were held.
    """

    def __init__(self, ground: Lease, nbytes: int, name: str) -> None:
        """Take the next bytes of a lease; of none there is no range, and only buffers of no bytes."""
        self.nbytes = nbytes
        self.peak = 0
        self._region = Region(ground.lease(nbytes).__enter__(), name, None) if nbytes else None
        self._share = self._region or ground
        self._start = 0
        self._given: weakref.WeakSet[Buffer] = weakref.WeakSet()

    def __contains__(self, buffer: Buffer) -> bool:
        return buffer in self._given

    @property
    def left(self) -> int:
        """The bytes that no buffer holds; they may come late, as where numpy's work still has freed memory."""
        return self.nbytes - sum(granules(one.nbytes) for one in self._alive())

    async def clear(self, stream: Stream) -> None:
        """Wait until all of it is free, and let a stream come behind all that was done with it.

        Raises:
            DeviceError: The device would not order the stream.
        """
        region = self._region
        if region is None:
            return
        whole = region.try_allocate(self.nbytes, stream=stream)
        if whole is None:
            if region.room() == self.nbytes:
                # All of it is free. A request would wait until the device does as it is told; the device says why not.
                stream.wait(stream.record())
            whole = await region.allocate_async(self.nbytes, stream=stream)
        self._start = whole.address
        whole.free()

    async def allocate(self, nbytes: int, stream: Stream, tag: str | None = None) -> Buffer:
        """Wait for memory at home on a stream."""
        buffer = await self._share.allocate_async(nbytes, stream=stream, tag=tag)
        self._given.add(buffer)
        self.peak = max(self.peak, self.nbytes - self.left)
        return buffer

    def has_no_gap_of(self, nbytes: int) -> bool:
        """Whether what is held leaves no piece of that length, and none is coming."""
        if self._region is None or self._region.room() < self.left:
            return False
        end, longest = self._start, 0
        for buffer in sorted(self._alive(), key=lambda one: one.address):
            longest = max(longest, buffer.address - end)
            end = buffer.address + granules(buffer.nbytes)
        return max(longest, self._start + self.nbytes - end) < granules(nbytes)

    def close(self) -> None:
        """Give the range back; what is still held of it goes on as memory of the lease."""
        if self._region is not None:
            self._region.close()

    def _alive(self) -> list[Buffer]:
        return [one for one in self._given if one.alive and one.nbytes]


class StepMemory:
    """What one step allocates from: a place for each size that its stage has stated, and no more than that."""

    def __init__(self, stage: str, places: Mapping[Use, Place], *, results: bool) -> None:
        """Take the places; `results` says that what the step answers stays until all is done."""
        self._stage = stage
        self._places = places
        self._results = results
        self._cleared: set[Use] = set()
        self._clearing = anyio.Lock()

    async def take(self, nbytes: int, use: Use, stream: Stream, tag: str | None) -> Buffer:
        """Wait for memory at home on a stream.

        Raises:
            InvalidRequest: It is more than the stage has left of what it stated, or what is left is in pieces.
        """
        if use not in get_args(Use):
            raise InvalidRequest("use", use, '"saved", "output" or "working"')
        place = self._places[use]
        if use not in self._cleared:
            async with self._clearing:  # a step may have tasks of its own
                if use not in self._cleared:
                    await place.clear(stream)
                    self._cleared.add(use)
        if granules(nbytes) > place.left:
            most = f"at most the {format_size(place.left)} that {self._stage!r} has left of what it states as {use}"
            raise InvalidRequest("size", Described(format_size(nbytes)), most, hint=f"state more as {use}")
        if nbytes and place.has_no_gap_of(nbytes):
            pieces = f"less, as the {format_size(place.left)} of {use} that {self._stage!r} has left are in pieces"
            raise InvalidRequest(
                "size", Described(format_size(nbytes)), pieces, hint="free first what was allocated last"
            )
        return await place.allocate(nbytes, stream, tag)

    def need_saved(self, values: object) -> None:
        """Raise where values have memory that the next steps use."""
        self._need("save()", values, "saved", but=("working",) if self._results else ("working", "output"))

    def need_answer(self, answer: object, given: object) -> None:
        """Raise where an answer has memory that the next steps use; a result may not lie in what was given either."""
        self._need("answer", answer, "output", but=("working", "saved") if self._results else ("working",))
        if self._results and buffers(answer, but=()) != buffers(answer, but=given):
            got = Described(f"what {self._stage!r} was given")
            raise InvalidRequest("answer", got, "memory allocated as output, as it is a result")

    def _need(self, what: str, values: object, use: Use, *, but: Sequence[Use]) -> None:
        for buffer in buffers_in(values):
            found = next((other for other in but if buffer in self._places[other]), None)
            if found is not None:
                got = Described(f"{format_size(buffer.nbytes)} that {self._stage!r} allocated as {found}")
                raise InvalidRequest(what, got, f"memory allocated as {use}", hint=f'allocate(size, use="{use}")')


def granules(nbytes: int) -> int:
    """Answer the bytes that a buffer of so many is counted as."""
    return -(-nbytes // GRANULE) * GRANULE
