"""What users hold of memory that may move to the host: a handle, and the blocks that keep the memory on the device."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING, final

from asyncmem.core import parse_priority
from asyncmem.errors import InvalidRequest
from asyncmem.figures import format_size
from asyncmem.pool.graph import need_uncaptured
from asyncmem.pool.handles import Handle, Using
from asyncmem.pool.loops import need_running_loop, running_loop
from asyncmem.pool.share import RequestTerms
from asyncmem.units import parse_duration

if TYPE_CHECKING:
    from collections.abc import Callable

    from asyncmem.core import Buffer
    from asyncmem.pool.spilling import Spilling


@final
class Spillable(Handle):
    """Memory that may move to the host while other requests need the device's. Made by `pool.spillable(buffer)`.

    ``async with held as buffer`` moves it back to the device if it was spilled, and keeps it there until the block
    ends; ``with`` does so for threads that cannot await. Use the buffer only inside the block: afterwards it is dead,
    whether the memory has moved or not, and its address may change. Blocks may overlap, in one task or several.

    It moves only while nothing uses, exports or pins it, and its streams are not captured. `free()` or a drop of the
    handle frees it wherever it is.
    """

    __slots__ = ("__weakref__", "_one", "_spilling")

    def __init__(self, spilling: Spilling, buffer: Buffer) -> None:
        self._spilling = spilling
        self._one = spilling.movable(buffer)
        spilling.mark(self._one)  # which the end of this handle undoes, also where an interrupt ends the wait for it

    def __repr__(self) -> str:
        state = "freed" if not self.alive else "on the host" if self.spilled else "on the device"
        return f"<asyncmem.Spillable of {format_size(self.nbytes)}: {state}>"

    @property
    def nbytes(self) -> int:
        """The size in bytes."""
        return self._one.nbytes

    @property
    def tag(self) -> str | None:
        """The tag that the buffer was allocated with, or None."""
        return self._one.tag

    @property
    def spilled(self) -> bool:
        """Whether the bytes are on the host now."""
        return self._one.host_copy is not None

    @property
    def alive(self) -> bool:
        """Whether it has not been freed."""
        return not self._one.freed

    def use(self, stream: object = None, *, priority: int = 0, timeout: float | str | None = None) -> Use:
        """Use it with more arguments: ``async with held.use(stream) as buffer``.

        Args:
            stream: A stream other than the home stream that uses the memory, as in `Buffer.use_on`.
            priority: Of the request for memory, if it has to move back; a larger one is served first.
            timeout: Seconds until that request raises `PoolTimeout`; None for the pool's option. A thread without a
                timeout gets the memory now or `OutOfMemoryError`, as with `allocate`.

        Raises:
            InvalidRequest: The stream is another device's, the priority is no integer, or the timeout is no time.
        """
        if stream is not None:
            self._spilling.opened.core.stream_number(stream)  # what is wrong with it is said here
        priority = parse_priority(priority)
        return Use(self, stream, priority, None if timeout is None else parse_duration(timeout))

    def free(self, stream: object = None) -> None:
        """Give the memory back, wherever it is; twice is fine. From any thread.

        Args:
            stream: The stream that used it last, if that is not the home stream; only matters while it is on the
            device.

        Raises:
            InvalidRequest: The stream is another device's; the memory stays as it was.
        """
        if stream is not None:
            self._spilling.opened.core.stream_number(stream)
        self._spilling.end(self._one, stream)

    async def __aenter__(self) -> Buffer:
        """Bring it back and keep it there; see `use`. Raises and is cancelled as the request for its memory is."""
        return await self.use().__aenter__()

    async def __aexit__(self, *_: object) -> None:
        """End a use; after the last one it may move again."""
        self._leave()

    def __enter__(self) -> Buffer:
        """Bring it back from a thread that cannot await, and keep it there."""
        return self.use().__enter__()

    def __exit__(self, *_: object) -> None:
        """End a use; after the last one it may move again."""
        self._leave()

    def _leave(self) -> None:
        self._spilling.leave(self._one, self._spilling.opened.core.owner())

    def __del__(self) -> None:
        one = getattr(self, "_one", None)
        if one is not None and not one.freed:
            self._spilling.opened.core.post(partial(self._spilling.drop, one))


@final
class Use(Using, Handle):
    """A use of spillable memory, to be entered once by ``async with`` or ``with``. Made by `Spillable.use`."""

    def __init__(self, held: Spillable, stream: object, priority: int, timeout: float | None) -> None:
        super().__init__(held._one, 0)
        self._held = held
        self._spilling = held._spilling
        self._stream = stream
        self._priority = priority
        self._timeout = timeout

    async def __aenter__(self) -> Buffer:
        """Wait until the memory is on the device, and keep it there until the block ends.

        Raises:
            BufferReleased: It has been freed.
            PoolTimeout: It could not come back in time; likewise whatever else `allocate_async` raises.
            DeviceError: The device refused to copy it back, or has lost it.

        Cancelled: it is where it was, and no memory is held for it.
        """
        spilling, one = self._spilling, self.one
        loop = need_running_loop(self._held, spilling.opened.core.loop)
        timeout = spilling.opened.options.timeout if self._timeout is None else self._timeout
        left = self._start(loop.now, timeout)
        try:
            while (latch := spilling.begin(self, patient=timeout is None)) is not None:
                await latch.wait(left())
                spilling.need_in_time(one, latch, timeout)
            if self.fetches:
                spilling.bring_back(self, await one.share.allocate_async(one.nbytes, **self._terms(left())))
            buffer = self._ordered()
            if one.arriving is not None:
                await one.arriving
        except BaseException:
            self.end()
            raise
        return buffer

    def __enter__(self) -> Buffer:
        """Bring the memory back from a thread that cannot await, and keep it there until the block ends.

        Where it is moving, or is being brought back already, the thread waits for that.

        Raises:
            BufferReleased: It has been freed.
            OutOfMemoryError: There is no memory for it now, and no `timeout`; else `PoolTimeout`.
            InvalidRequest: On an event loop's thread, while it moves or a task is bringing it back.
            DeviceError: The device refused to copy it back, or has lost it.
        """
        spilling, one, timeout = self._spilling, self.one, self._timeout
        left = self._start(time.monotonic, timeout)
        try:
            while (latch := spilling.begin(self, patient=timeout is None)) is not None:
                self._need_no_loop()
                latch.block(left())
                spilling.need_in_time(one, latch, timeout)
            if self.fetches:
                spilling.bring_back(self, one.share.allocate(one.nbytes, **self._terms(left())))
            buffer = self._ordered()
            if one.arriving is not None:
                one.arriving.block()
        except BaseException:
            self.end()
            raise
        return buffer

    async def __aexit__(self, *_: object) -> None:
        """End a use; after the last one it may move again."""
        self.end()

    def __exit__(self, *_: object) -> None:
        """End a use; after the last one it may move again."""
        self.end()

    def end(self) -> None:
        """End the use."""
        self._spilling.end_use(self)

    def _start(self, now: Callable[[], float], timeout: float | None) -> Callable[[], float | None]:
        """Start the clock; return a function for the seconds left, None if they are not bounded."""
        self.owner, self.over = self._spilling.opened.core.owner(), False
        end = None if timeout is None else now() + timeout
        return lambda: None if end is None else max(0.0, end - now())

    def _need_no_loop(self) -> None:
        if running_loop() is not None:
            raise InvalidRequest("with", self._held, "memory that is not moving just now", hint="async with it")

    def _terms(self, timeout: float | None) -> RequestTerms:
        """Return the terms of the request for its memory."""
        need_uncaptured(self.one.stream, hint="bring it back before the capture begins")
        return RequestTerms(stream=self.one.stream, tag=self.one.tag, priority=self._priority, timeout=timeout)

    def _ordered(self) -> Buffer:
        """Return the buffer of a use that has begun, with the named stream ordered behind its home."""
        assert self.buffer is not None
        if self._stream is not None:
            self.buffer.use_on(self._stream)
        return self.buffer
