"""Buffers whose memory outlives them: pinned ones, which keep their place, and those that may move to the host."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, NamedTuple, NoReturn, Self, final

from asyncmem.errors import BufferReleased

if TYPE_CHECKING:
    from asyncmem.core import Buffer
    from asyncmem.devices import Fence
    from asyncmem.pool.latch import Latch
    from asyncmem.pool.ports import AnyShare


class Handle:
    """A handle that can be neither copied nor pickled, as what it holds would be given back twice."""

    __slots__ = ()

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"cannot copy or pickle {type(self).__name__!r} object")


@final
class Pin(Handle):
    """Keeps a buffer's address and the memory behind it. Made by `Buffer.pin`; ended by `unpin`, ``with`` or dropping.

    `buffer.free()` ends the buffer as usual, but its memory is neither reused nor given back to the device before its
    last pin has ended. Then it goes back in the stream order of the free. Pinning orders no streams: if something else
    uses the address, such as a network card, unpin after it has finished.

    Attributes:
        address: Where the buffer is; also after it was freed.
        nbytes: Its bytes.
    """

    __slots__ = ("__weakref__", "_export", "_pins", "address", "nbytes")

    def __init__(self, pins: dict[int, tuple[int, int]], buffer: Buffer) -> None:
        self._pins = pins  # by identity, address and bytes; changed in one step, for interrupts and finalizers
        self._export: object = buffer._pin()
        self.address = buffer.address
        self.nbytes = buffer.nbytes
        pins[id(self)] = self.address, buffer._block_bytes

    def __repr__(self) -> str:
        return f"<asyncmem.pool.Pin of {self.nbytes} bytes at {self.address:#x}{'' if self.active else ': ended'}>"

    @property
    def active(self) -> bool:
        """Whether it still holds."""
        return self._export is not None

    def unpin(self) -> None:
        """End the pin. Twice is fine; from any thread."""
        self._pins.pop(id(self), None)
        self._export = None

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """End the pin."""
        self.unpin()

    def __del__(self) -> None:
        if getattr(self, "_export", None) is not None:
            self.unpin()


class HostCopy(NamedTuple):
    """The bytes while they are not on the device.

    Attributes:
        host: The page-locked memory that has them.
        fence: Behind the copy that brought them there.
    """

    host: Buffer
    fence: Fence


class Movable:
    """One marked buffer, as the pool knows it; its user holds a `Spillable`. Changed under the pool's lock only.

    Its memory is handed out for a use as a buffer that dies with the last use. So a buffer that was kept is
    freed then, whether the memory has moved or not.

    Attributes:
        buffer: Its memory on the device, or None.
        host_copy: Its bytes on the host, or None.
        moving: What to wait for while it is about to move, or None.
        arriving: What to wait for before the host touches the memory of a device that it can read, or None.
        share: Who its memory is charged to, or was when last looked at.
        makes_room: The shares in which it counts as memory that may move.
        stream: The home stream that it comes back to.
        owners: The numbers of its users now, once for each use.
        fetching: What to wait for while a use brings it back, or None.
        patient: Whether the use that brings it back has no timeout.
    """

    def __init__(self, buffer: Buffer, share: AnyShare) -> None:
        self.nbytes = buffer.nbytes
        self.size = buffer._block_bytes
        self.tag = buffer.tag
        self.share = share
        self.makes_room: tuple[AnyShare, ...] = ()
        self.stream = buffer.stream
        self.buffer: Buffer | None = buffer
        self.host_copy: HostCopy | None = None
        self.moving: Latch[None] | None = None
        self.arriving: Fence | None = None
        self.owners: list[int] = []
        self.fetching: Latch[None] | None = None
        self.patient = True
        self._holder = 0
        self._handed_out = True
        self._readers: weakref.WeakSet[Buffer] = weakref.WeakSet()

    @property
    def freed(self) -> bool:
        """Whether it has been freed, also by a `free` of the buffer that was handed out."""
        return self.host_copy is None and (self.buffer is None or not self.buffer.alive)

    @property
    def bound(self) -> bool:
        """Whether it is about to move."""
        return self.moving is not None and not self.freed

    def need(self) -> None:
        """Raise `BufferReleased` where it has been freed."""
        if self.freed:
            raise BufferReleased(self.nbytes, tag=self.tag, action="using it")

    def begin(self, owner: int) -> Buffer:
        """Count a use of the buffer, and return it; the first to use it counts as its holder."""
        buffer = self.buffer
        assert buffer is not None
        self.owners.append(owner)
        self._handed_out = True
        self._hold(buffer)
        return buffer

    def end(self, owner: int) -> bool:
        """Count the end of a use; return whether that was the last and the memory is still there."""
        self.owners.remove(owner if owner in self.owners else self.owners[0])
        buffer = self.buffer
        if buffer is None or not buffer.alive:
            return False
        self._hold(buffer)
        if self.owners:
            return False
        self.stream = buffer.stream
        self.take_over()
        return True

    def take_over(self) -> bool:
        """End the buffer that was handed out; return whether the memory cannot be reached by it any more.

        An export holds it up, and so does a reader of its CUDA array interface that keeps the buffer for that.
        """
        buffer = self.buffer
        if self._handed_out and buffer is not None and buffer.alive:
            lent = buffer._lent
            try:
                self.buffer = buffer._renew()
            except BufferError:
                return False
            self._handed_out = False
            if lent:
                self._readers.add(buffer)
        return not self._readers

    def moved_out(self, host_copy: HostCopy) -> None:
        """Note that the bytes are on the host now."""
        self.buffer, self.host_copy, self.arriving = None, host_copy, None

    def moved_in(self, buffer: Buffer, arriving: Fence | None) -> None:
        """Note that the bytes are in a new buffer on the device, or will be behind that fence."""
        self._holder = 0
        self.buffer, self.host_copy, self.arriving = buffer, None, arriving

    def _hold(self, buffer: Buffer) -> None:
        # One holder at a time: the proof would count memory twice that two owners held.
        if self._holder not in self.owners:
            buffer._let_go()
            self._holder = self.owners[0] if self.owners else 0
            if self._holder:
                buffer._hold(self._holder)


class Using:
    """The state of one use of a buffer. Changed under the pool's lock only.

    Attributes:
        one: What is used.
        owner: The number of the user.
        buffer: Its memory once the use has begun, or None.
        fetches: Whether its caller brings it back.
        over: Whether it has ended.
    """

    def __init__(self, one: Movable, owner: int) -> None:
        self.one = one
        self.owner = owner
        self.buffer: Buffer | None = None
        self.fetches = False
        self.over = False
