"""Buffers whose place must not change hands: network libraries register memory by its address and keep using it."""

from __future__ import annotations

import threading
from functools import partial
from typing import TYPE_CHECKING, Self, final

if TYPE_CHECKING:
    from asyncmem.core import Buffer, Core


class Pins:
    """What is pinned of one pool.

    Attributes:
        nbytes: Bytes of the blocks that are pinned, each counted once.
    """

    def __init__(self, core: Core) -> None:
        self.nbytes = 0
        self._core = core
        self._lock = threading.Lock()
        self._counts: dict[int, int] = {}  # by address

    def count(self, address: int, nbytes: int, change: int) -> None:
        """Count a pin that comes or goes, soon. From anywhere, finalizers included."""
        self._core.post(partial(self._count, address, nbytes, change))

    def _count(self, address: int, nbytes: int, change: int) -> bool:
        if not self._lock.acquire(blocking=False):
            return False
        try:
            before = self._counts.pop(address, 0)
            after = before + change
            if after:
                self._counts[address] = after
            self.nbytes += nbytes * (bool(after) - bool(before))
        finally:
            self._lock.release()
        return True


@final
class Pin:
    """Keeps a buffer's address and the memory behind it. Made by `Buffer.pin`; ended by `unpin`, ``with`` or dropping.

    Meanwhile `buffer.free()` ends the buffer as ever, but its memory is neither handed out again nor given back to the
    device before the last of its pins has ended. Then it goes back in the order that the free asked for. Pinning orders
    no streams: who uses the address from elsewhere, as a network card does, unpins once that is over.

    Attributes:
        address: Where the buffer is; also after it was freed.
        nbytes: Its bytes.
    """

    __slots__ = ("__weakref__", "_export", "_pins", "_size", "address", "nbytes")

    def __init__(self, pins: Pins, buffer: Buffer) -> None:
        self._export: object = buffer._pin()
        self._pins = pins
        self._size = buffer.size
        self.address = buffer.address
        self.nbytes = buffer.nbytes
        pins.count(self.address, self._size, 1)

    def __repr__(self) -> str:
        return f"<asyncmem.Pin of {self.nbytes} bytes at {self.address:#x}{'' if self.active else ': ended'}>"

    @property
    def active(self) -> bool:
        """Whether it still holds."""
        return self._export is not None

    def unpin(self) -> None:
        """Let go. Twice is fine; from any thread."""
        export, self._export = self._export, None
        if export is not None:
            self._pins.count(self.address, self._size, -1)

    def __enter__(self) -> Self:
        """Answer itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Let go."""
        self.unpin()

    def __del__(self) -> None:
        if getattr(self, "_export", None) is not None:
            self.unpin()
