"""Two or more buffers of a device: the stream works on one while the next is filled."""

import math
import weakref
from collections import deque
from collections.abc import Generator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Self, final

from asyncmem.arrays import Array, element_type, lengths_of
from asyncmem.core import Batch, Buffer, Ready
from asyncmem.devices import Fence
from asyncmem.errors import Described, InvalidRequest
from asyncmem.pipeline.resources import BorrowedStreams, Memory, share_of
from asyncmem.pipeline.staging import HostArray, HostCopier, Workers, host_array
from asyncmem.pool import Copy, Request
from asyncmem.pool.latch import Latch
from asyncmem.pool.pool import pool_of
from asyncmem.units import parse_count


@dataclass(eq=False)
class _Entry:
    """One of the buffers. Its home is a stream of its own, which does nothing but fill it."""

    buffer: Buffer
    array: Array  # over its data, in the shape that the data has
    left: Fence | None = None  # behind the user's last work on it


@final
class DoubleBuffer:
    """Arrays of one shape, used in turn: a stream works on `current` while the next are filled from the host.

    Enter it with ``with`` or ``async with``, which allocates all of its buffers or none; the end of the block frees
    them. Nothing waits on the host, except to read data that is not page-locked: the user's stream waits for the copy
    when the buffers are swapped, and a copy into a buffer waits for the user's last work on it. That is the work
    submitted to `stream` before the swap away from it.

    Args:
        pool: A pool, a budget, or the name of a device.
        shape: The shape of each; data may be shorter in the first dimension, as the last batch of a data set.
        dtype: Their elements.
        buffers: How many; all but one can be filled ahead.
        stream: The stream that works on `current`; None for the device's default stream.
        pinned: Whether data that is not page-locked goes through page-locked memory, which is faster.
        workers: How many threads read ordinary memory: several buffers at a time, or the pieces of one together.
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
        self._count = parse_count(buffers, what="buffers", least=2, most=1024)
        self._share = share_of(pool)
        self._pool = pool_of(self._share)
        self._shape = lengths_of(shape)
        self._element = element_type(dtype)
        self._asked = stream
        self._threads = Workers(parse_count(workers, what="workers", least=1, most=1024), "asyncmem double buffer")
        self._end_threads = weakref.finalize(self, self._threads.end)  # also where the block never ends
        self._tag = tag
        self._batch: Batch | None = None
        self._free: deque[_Entry] = deque()
        self._ahead: deque[tuple[_Entry, Latch[Copy]]] = deque()
        self._current: _Entry | None = None
        self._copier = HostCopier(self._pool, pinned=pinned, tag=tag)
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

    async def __aexit__(self, *_: object) -> None:
        """Free the buffers."""
        self.free()

    def __enter__(self) -> Self:
        """Wait for the memory on this thread (blocks)."""
        return self._begin(self._copier.wait(self._ask()))

    def __exit__(self, *_: object) -> None:
        """Free the buffers."""
        self.free()

    def free(self) -> None:
        """Free the buffers, behind the work of their streams, without waiting for it; twice is not an error."""
        self._copier.end()
        self._end_threads()
        batch, self._batch = self._batch, None
        if batch is not None:
            batch.__exit__(None, None, None)
            self._streams.give_back()

    def _ask(self) -> Ready[Batch] | Request[Batch]:
        if self._entered:
            raise InvalidRequest("DoubleBuffer", self, "one that was not entered before")
        self._user = self._pool.device.stream_of(self._asked)
        nbytes = math.prod(self._shape) * self._element.itemsize
        return self._share.allocate_batch([nbytes] * self._count, stream=self._user, tag=self._tag)

    def _begin(self, batch: Batch) -> Self:
        self._entered = True
        batch.__enter__()
        self._batch, self._streams = batch, BorrowedStreams(self._pool)
        for buffer in batch:
            # A stream for each, so that a wait for one array waits for its data, and no other.
            buffer.hand_over(self._streams.stream("filling"))
            self._free.append(_Entry(buffer, buffer.view(self._element.name, self._shape)))
        return self

    # -- its turns ---------------------------------------------------------------------------------------------------

    @property
    def current(self) -> Array:
        """The array that the user's stream may work on until the next swap, in the shape of its data.

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

    def prefetch_next(self, data: object) -> "Transfer":
        """Start filling the next buffer; await the result before you reuse the memory of the data.

        Args:
            data: A host array of numpy, torch or another library, by DLPack or the buffer protocol. It must not change
                until the transfer is done.

        Raises:
            InvalidRequest: It has another shape or elements, or all buffers but `current` are filled already.
        """
        source = self._fitting(data)
        if self._batch is None:
            raise InvalidRequest("prefetch_next()", self, 'a call inside of its "with" or "async with" block')
        if not self._free:
            raise InvalidRequest("prefetch_next()", self, "a buffer that is free: swap() before")
        entry = self._free[0]
        if entry.left is not None:
            entry.buffer.stream.wait(entry.left)
            entry.left = None
        reading = self._read(entry.buffer, source.data)
        entry.array = entry.buffer.view(self._element.name, source.shape)
        self._ahead.append((self._free.popleft(), reading))
        return Transfer(reading)

    def swap(self) -> Array:
        """Make the buffer that was filled first the current one, and return it; the user's stream waits for its data.

        It blocks while data that is not page-locked is read. On an event loop use `swap_async`.

        Raises:
            InvalidRequest: None is being filled.
            DeviceError: Filling it failed; that buffer can be filled again, and `current` stays as it was.
        """
        entry, reading = self._first()
        try:
            copy = reading.block()
            if copy is not None and not copy.ordered:
                copy.block()
        except Exception:
            self._ahead.popleft()
            self._free.append(entry)
            raise
        former = self._current
        if former is not None:
            former.left = self._user.record()
        entry.buffer.use_on(self._user)
        self._ahead.popleft()
        self._current = entry
        if former is not None:
            self._free.append(former)
        return entry.array

    async def swap_async(self) -> Array:
        """Swap as `swap` does, without blocking the loop while data is read.

        Cancelled: nothing was swapped.
        """
        with suppress(Exception):  # raised again below
            copy = await self._first()[1].wait()
            if copy is not None and not copy.ordered:
                await copy
        return self.swap()

    def _first(self) -> tuple[_Entry, Latch[Copy]]:
        if not self._ahead:
            raise InvalidRequest("swap()", self, "prefetch_next() before")
        return self._ahead[0]

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

    def _read(self, buffer: Buffer, source: memoryview) -> Latch[Copy]:
        pieces = [(0, source)]
        if self._copier.blocks(pieces):
            reading = Latch(partial(self._copier.stage, buffer, pieces, self._threads))
            self._threads.submit(reading)
        else:
            (copy,) = self._copier.copy(buffer, pieces)
            reading = Latch(lambda: copy)
            reading()
        return reading


@final
class Transfer:
    """A copy that has started, or will once a thread has read its data: await it, or `block()` a thread.

    The data must stay as it is until then. Cancelling the await stops nothing. Made by `DoubleBuffer.prefetch_next`.
    """

    __slots__ = ("__weakref__", "_reading")

    def __init__(self, reading: Latch[Copy]) -> None:
        self._reading = reading

    def __repr__(self) -> str:
        return f"<asyncmem.pipeline.Transfer: {'done' if self.done() else 'under way'}>"

    def done(self) -> bool:
        """Return whether it is complete, or has failed."""
        try:
            copy = self._reading.result()
        except Exception:  # noqa: BLE001 -- the waiting task gets the error
            return True
        return copy is not None and copy.done()

    def block(self, timeout: float | None = None) -> bool:
        """Block this thread until it is complete; return False if `timeout` seconds passed first.

        Raises:
            DeviceError: It failed, or the device is lost.
        """
        copy = self._reading.block(timeout)
        return copy is not None and copy.block(timeout)

    def __await__(self) -> Generator[object, object, None]:
        """Wait on asyncio, uvloop or trio until all of it is there.

        Raises:
            DeviceError: It failed, or the device is lost.
        """
        copy = yield from self._reading.wait().__await__()
        assert copy is not None
        yield from copy.__await__()
