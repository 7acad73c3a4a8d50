"""What users hold of memory that may move to the host: a handle, and the blocks in which the memory is at home."""

from __future__ import annotations

import time
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, final

from asyncmem.core import parse_priority
from asyncmem.errors import InvalidRequest
from asyncmem.pool.graph import need_uncaptured
from asyncmem.pool.latch import Latch
from asyncmem.pool.loops import need_running_loop, running_loop
from asyncmem.pool.share import RequestTerms
from asyncmem.units import format_size, parse_duration

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from asyncmem.core import Buffer
    from asyncmem.devices import Fence
    from asyncmem.pool.spilling import Spilling


@final
class Spillable:
    """Memory that moves to page-locked host memory while others need the device's. Made by `pool.spillable(buffer)`.

    ``async with held as buffer`` brings it home where it is away, and keeps it there until the block ends; ``with``
    does so for threads that cannot await. The buffer is good for the block alone: afterwards it is dead, whether the
    memory has moved or not, and each block may find it elsewhere. Blocks may overlap, in one task or several.

    It moves only while nobody uses it, nothing exports or pins it, and its streams are not captured. `free()` or a drop
    of the handle frees it wherever it is.
    """

    __slots__ = ("__weakref__", "_one", "_spilling")

    def __init__(self, spilling: Spilling, buffer: Buffer) -> None:
        self._one = spilling.mark(buffer)
        self._spilling = spilling

    def __repr__(self) -> str:
        state = "freed" if self.is_freed else "on the host" if self.spilled else "on the device"
        return f"<asyncmem.Spillable of {format_size(self.nbytes)}: {state}>"

    @property
    def nbytes(self) -> int:
        """The bytes that were asked for."""
        return self._one.nbytes

    @property
    def tag(self) -> str | None:
        """The tag that the buffer was allocated with, or None."""
        return self._one.tag

    @property
    def spilled(self) -> bool:
        """Whether the bytes are on the host now."""
        return self._one.away is not None

    @property
    def is_freed(self) -> bool:
        """Whether it has been freed."""
        return self._one.gone

    def use(self, stream: object = None, *, priority: int = 0, timeout: float | str | None = None) -> Use:
        """Say more about a use: ``async with held.use(stream) as buffer``.

        Args:
            stream: A stream other than the home that uses the memory, as `Buffer.use_on` names one.
            priority: That of the request for memory, where it has to come home; larger goes first.
            timeout: Seconds after which that is given up with `PoolTimeout`; None for the pool's option. A thread that
                names none gets the memory now or `OutOfMemoryError`, as `allocate` does.

        Raises:
            InvalidRequest: The stream is another device's, the priority is no integer, or the timeout is no time.
        """
        if stream is not None:
            self._spilling.opened.stream_index(stream)  # what is wrong with it is said here
        priority = parse_priority(priority)
        return Use(self, stream, priority, None if timeout is None else parse_duration(timeout))

    def free(self, stream: object = None) -> None:
        """Give the memory back, wherever it is; twice is fine. From any thread.

        Args:
            stream: The stream that used it last, when that is not its home; only matters while it is at home.

        Raises:
            InvalidRequest: The stream is another device's; the memory stays as it was.
        """
        if stream is not None:
            self._spilling.opened.stream_index(stream)
        self._spilling.end(self._one, stream)

    async def __aenter__(self) -> Buffer:
        """Bring it home and keep it there; see `use`. Raises and is cancelled as the request for its memory is."""
        return await self.use().__aenter__()

    async def __aexit__(self, *_: object) -> None:
        """Let it move again, after the last block."""
        self._leave()

    def __enter__(self) -> Buffer:
        """Bring it home from a thread that cannot await, and keep it there."""
        return self.use().__enter__()

    def __exit__(self, *_: object) -> None:
        """Let it move again, after the last block."""
        self._leave()

    def _leave(self) -> None:
        self._spilling.leave(self._one, self._spilling.opened.core.owner())

    def __del__(self) -> None:
        one = getattr(self, "_one", None)
        if one is not None and not one.gone:
            self._spilling.opened.core.post(partial(self._spilling.drop, one))


@final
class Use:
    """A use of spillable memory, to be entered once by ``async with`` or ``with``. Made by `Spillable.use`."""

    __slots__ = ("_held", "_owner", "_priority", "_spilling", "_stream", "_timeout")

    def __init__(self, held: Spillable, stream: object, priority: int, timeout: float | None) -> None:
        self._held = held
        self._spilling = held._spilling
        self._stream = stream
        self._priority = priority
        self._timeout = timeout
        self._owner = 0

    async def __aenter__(self) -> Buffer:
        """Wait until the memory is at home, and keep it there until the block ends.

        Raises:
            BufferReleased: It has been freed.
            PoolTimeout: It could not come home in time; likewise whatever else `allocate_async` raises.
            DeviceError: The device refused to copy it back, or has lost it.

        Cancelled: it is where it was, and no memory is held for it.
        """
        spilling, one = self._spilling, self._held._one
        loop = need_running_loop(self._held, spilling.opened.core.loop)
        timeout = spilling.opened.options.timeout if self._timeout is None else self._timeout
        left = _countdown(loop.now, timeout)
        self._owner = owner = spilling.opened.core.owner()
        while isinstance(found := spilling.begin(one, owner, patient=timeout is None), Latch):
            try:
                await found.wait(left())
            finally:
                spilling.unfollow(one, owner)
            spilling.need_in_time(one, found, timeout)
        if found is None:
            with self._fetching(left()) as terms:
                found = spilling.bring_home(one, await one.share.allocate_async(one.nbytes, **terms), owner)
        with self._begun(found) as arriving:
            if arriving is not None:
                await arriving
        return found

    def __enter__(self) -> Buffer:
        """Bring the memory home from a thread that cannot await, and keep it there until the block ends.

        Where it is moving, or somebody is bringing it home already, the thread waits for that.

        Raises:
            BufferReleased: It has been freed.
            OutOfMemoryError: There is no memory for it now, and no `timeout`; else `PoolTimeout`.
            InvalidRequest: On an event loop's thread, while it moves or a task is bringing it home.
            DeviceError: The device refused to copy it back, or has lost it.
        """
        spilling, one, timeout = self._spilling, self._held._one, self._timeout
        left = _countdown(time.monotonic, timeout)
        self._owner = owner = spilling.opened.core.owner()
        while isinstance(found := spilling.begin(one, owner, patient=timeout is None), Latch):
            try:
                if running_loop() is not None:
                    raise InvalidRequest("with", self._held, "memory that is not moving just now", hint="async with it")
                found.block(left())
            finally:
                spilling.unfollow(one, owner)
            spilling.need_in_time(one, found, timeout)
        if found is None:
            with self._fetching(left()) as terms:
                found = spilling.bring_home(one, one.share.allocate(one.nbytes, **terms), owner)
        with self._begun(found) as arriving:
            if arriving is not None:
                arriving.block()
        return found

    async def __aexit__(self, *_: object) -> None:
        """Let it move again, after the last block."""
        self.end()

    def __exit__(self, *_: object) -> None:
        """Let it move again, after the last block."""
        self.end()

    def end(self) -> None:
        """End the use."""
        self._spilling.leave(self._held._one, self._owner)

    @contextmanager
    def _fetching(self, timeout: float | None) -> Iterator[RequestTerms]:
        """Bring it home by a request of these terms; let those look again who wait for that."""
        one = self._held._one
        try:
            need_uncaptured(one.stream)
            yield RequestTerms(stream=one.stream, tag=one.tag, priority=self._priority, timeout=timeout)
        finally:
            self._spilling.fetched(one)

    @contextmanager
    def _begun(self, buffer: Buffer) -> Iterator[Fence | None]:
        """Order the named stream behind the buffer's home; give what to wait for; end the use where that fails."""
        try:
            if self._stream is not None:
                buffer.use_on(self._stream)
            yield self._held._one.arriving
        except BaseException:
            self.end()
            raise


def _countdown(now: Callable[[], float], timeout: float | None) -> Callable[[], float | None]:
    """Return a function for the seconds left of a time that begins now; None where it is not bounded."""
    if timeout is None:
        return _no_end
    end = now() + timeout
    return lambda: max(0.0, end - now())


def _no_end() -> None:
    """Return that there is no end."""
