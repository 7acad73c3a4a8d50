"""Two or more buffers of a device: the stream works on one while the next is filled."""

from __future__ import annotations

import math
import weakref
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Self, final

from asyncmem.arrays import element_type, lengths_of
from asyncmem.errors import Described, InvalidRequest
from asyncmem.pipeline.crew import Crew
from asyncmem.pipeline.filling import fill, fill_by_way_of, holds_up
from asyncmem.pipeline.leaves import host_array
from asyncmem.pipeline.memory import Patience, pool_of, share_of, stream_of
from asyncmem.pipeline.streams import Lent
from asyncmem.pipeline.transfer import Transfer
from asyncmem.pool.latch import Latch
from asyncmem.units import parse_count

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

    from asyncmem.arrays import Array
    from asyncmem.core import Batch, Buffer, Ready
    from asyncmem.devices import Fence
    from asyncmem.pipeline.filling import Piece
    from asyncmem.pipeline.leaves import HostArray
    from asyncmem.pipeline.memory import Memory
    from asyncmem.pool import Copy, Request


@dataclass(eq=False)
class _Slot:
    """One of the buffers. Its home is a stream of its own, which does nothing but fill it."""

    buffer: Buffer
    array: Array  # over its data, in the shape that the data has
    filling: Transfer | None = None
    left: Fence | None = None  # behind the user's last work on it


@final
class DoubleBuffer:
    """Arrays of one shape that take turns: a stream works on `current` while the next are filled from the host.

    Enter it with ``with`` or ``async with``, which allocates all of its buffers or none; the end of the block frees
    them. Nothing here waits on the host, except for data to be read that is not page-locked: the user's stream waits
    for the copy when the buffers are swapped, and a copy into a buffer waits for the user's last work on it. That is
    the work submitted to `stream` before the swap away from it.

    Args:
        pool: A pool, a budget, or the name of a device.
        shape: The shape of each; data may be shorter in the first dimension, as the last of a data set is.
        dtype: Their elements.
        buffers: How many; all but one can be filled ahead.
        stream: The stream that works on `current`; None for the device's default stream.
        pinned: Whether data that is not page-locked goes through page-locked memory, which is faster.
        workers: How many threads read what goes that way, several buffers at a time, or the parts of one together.
        tag: A label for reports.

    Raises:
        InvalidRequest: One of the arguments cannot be right.
    """

    def __init__(
        self,
        pool: Memory,
        shape: int | Sequence[int],
        dtype: object = "float32",
        *,
        buffers: int = 2,
        stream: object = None,
        pinned: bool = True,
        workers: int = 4,
        tag: str | None = None,
    ) -> None:
        self._count = parse_count(buffers, what="buffers", least=2)
        self._share = share_of(pool)
        self._pool = pool_of(self._share)
        self._shape = lengths_of(shape)
        self._element = element_type(dtype)
        self._asked = stream
        self._pinned = pinned
        self._workers = parse_count(workers, what="workers", least=1)
        self._crew: Crew | None = None
        self._tag = tag
        self._batch: Batch | None = None
        self._free: deque[_Slot] = deque()
        self._ahead: deque[_Slot] = deque()
        self._current: _Slot | None = None
        self._patience = Patience()
        self._entered = False

    def __repr__(self) -> str:
        state = "not in use" if self._batch is None else f"{self.ahead} ahead"
        return f"<asyncmem.pipeline.DoubleBuffer of {self._count} x {self._element.name}{list(self._shape)}: {state}>"

    # -- its life ----------------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        """Wait for the memory; the current task counts as its owner until the block ends.

        Cancelled: nothing was allocated.
        """
        await self._pool.open()
        return self._begin(await self._ask())

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Free the buffers."""
        self.free()

    def __enter__(self) -> Self:
        """Wait for the memory on this thread (blocks)."""
        return self._begin(self._patience.wait(self._ask()))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Free the buffers."""
        self.free()

    def free(self) -> None:
        """Free the buffers, behind what their streams were given, without waiting for that; twice is fine."""
        self._patience.end()
        if self._crew is not None:
            self._dismiss()
        batch, self._batch = self._batch, None
        if batch is not None:
            batch.__exit__(None, None, None)
            self._lent.give_back()

    def _ask(self) -> Ready[Batch] | Request[Batch]:
        if self._entered:
            raise InvalidRequest("DoubleBuffer", self, "one that was not entered before")
        self._user = stream_of(self._pool.device, self._asked)
        nbytes = math.prod(self._shape) * self._element.itemsize
        return self._share.allocate_batch([nbytes] * self._count, stream=self._user, tag=self._tag)

    def _begin(self, batch: Batch) -> Self:
        self._entered = True
        batch.__enter__()
        self._batch, self._lent = batch, Lent(self._pool._opened)
        for buffer in batch:
            # A stream for each, so that whoever waits for one waits for the data that is in it, and no other.
            buffer.hand_over(self._lent.stream("filling"))
            self._free.append(_Slot(buffer, buffer.view(self._element.name, self._shape)))
        return self

    # -- its turns ---------------------------------------------------------------------------------------------------

    @property
    def current(self) -> Array:
        """What the user's stream may work on until the next swap, in the shape of the data that is in it.

        Raises:
            InvalidRequest: Nothing has been swapped in yet.
        """
        if self._current is None:
            raise InvalidRequest("current", self, "prefetch_next() and swap() before")
        return self._current.array

    @property
    def ahead(self) -> int:
        """How many buffers have been filled, or are being filled, ahead of `current`."""
        return len(self._ahead)

    def prefetch_next(self, data: object) -> Transfer:
        """Start filling the next buffer, and answer what to await where the data's memory is to be used again.

        Args:
            data: An array of the host, of numpy, torch or whatever speaks DLPack or the buffer protocol. It must stay
                as it is until the transfer is done.

        Raises:
            InvalidRequest: It has another shape or elements, or all buffers but `current` are filled already.
        """
        source = self._fitting(data)
        if self._batch is None:
            raise InvalidRequest("prefetch_next()", self, 'a call inside of its "with" or "async with" block')
        if not self._free:
            raise InvalidRequest("prefetch_next()", self, "a buffer that is free: swap() before")
        slot = self._free[0]
        if slot.left is not None:
            slot.buffer.stream.wait(slot.left)
            slot.left = None
        slot.filling = transfer = Transfer(self._reading(slot.buffer, source.data))
        slot.array = slot.buffer.view(self._element.name, source.shape)
        self._ahead.append(self._free.popleft())
        return transfer

    def swap(self) -> Array:
        """Make the buffer that was filled first the current one, and answer it; the user's stream waits for its data.

        It blocks for as long as data is read that is not page-locked. On an event loop use `swap_async`.

        Raises:
            InvalidRequest: None is being filled.
            DeviceError: Filling it failed; that buffer can be filled again, and `current` stays as it was.
        """
        filling = self._first()
        try:
            filling.block_until_ordered()
        except Exception:
            self._free.append(self._ahead.popleft())
            raise
        slot, former = self._ahead[0], self._current
        if former is not None:
            former.left = self._user.record()
        slot.buffer.use_on(self._user)
        self._current = self._ahead.popleft()
        if former is not None:
            self._free.append(former)
        return slot.array

    async def swap_async(self) -> Array:
        """Swap as `swap` does, and leave the loop to others while data is read.

        Cancelled: nothing was swapped.
        """
        with suppress(Exception):  # raised again below
            await self._first().ordered()
        return self.swap()

    def _first(self) -> Transfer:
        if not self._ahead:
            raise InvalidRequest("swap()", self, "prefetch_next() before")
        filling = self._ahead[0].filling
        assert filling is not None
        return filling

    def _fitting(self, data: object) -> HostArray:
        source = host_array(data)
        if source is None:
            raise InvalidRequest("data", data, "an array of the host")
        shape = source.shape
        fits = len(shape) == len(self._shape) and shape[1:] == self._shape[1:] and shape[:1] <= self._shape[:1]
        if not fits or element_type(source.dtype) != self._element:
            expected = f"{self._element.name}{list(self._shape)}, or shorter in its first dimension"
            raise InvalidRequest("data", Described(f"{source.dtype}{list(shape)}"), expected)
        return source

    def _reading(self, buffer: Buffer, source: memoryview) -> Latch[Copy]:
        pieces = [(0, source)]
        if self._pinned and holds_up(self._pool, pieces):
            crew = self._crew or self._hire()
            reading = Latch(partial(self._stage, crew, buffer, pieces))
            crew.submit(reading)
        else:
            (copy,) = fill(buffer, pieces)
            reading = Latch(lambda: copy)
            reading()
        return reading

    def _hire(self) -> Crew:
        crew = self._crew = Crew(self._workers)
        self._dismiss = weakref.finalize(self, crew.end)  # once: at the end of the block, or where that never comes
        crew.start("asyncmem double buffer stages")
        return crew

    def _stage(self, crew: Crew, buffer: Buffer, pieces: list[Piece]) -> Copy:
        nbytes = sum(source.nbytes for _, source in pieces)
        request = self._pool.pinned.allocate_async(nbytes, stream=buffer.stream, tag=self._tag)
        return fill_by_way_of(self._patience.wait(request), buffer, pieces, crew)
