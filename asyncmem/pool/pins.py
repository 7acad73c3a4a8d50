"""Buffers whose place must not change hands: network libraries register memory by its address and keep using it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self, final

from asyncmem.pool.handle import Handle

if TYPE_CHECKING:
    from asyncmem.core import Buffer


class Pins:
    """What is pinned of one pool. Each change is one step, for interrupts and finalizers."""

    def __init__(self) -> None:
        self._places: dict[int, tuple[int, int]] = {}  # address and bytes, by the identity of the pin

    @property
    def nbytes(self) -> int:
        """Bytes of the blocks that are pinned, each counted once."""
        return sum(nbytes for _, nbytes in set(self._places.copy().values()))

    def begin(self, pin: Pin, address: int, nbytes: int) -> None:
        """Count a pin."""
        self._places[id(pin)] = address, nbytes

    def end(self, pin: Pin) -> None:
        """Count it no more; twice is fine."""
        self._places.pop(id(pin), None)


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

    def __init__(self, pins: Pins, buffer: Buffer) -> None:
        self._pins = pins
        self._export: object = buffer._pin()
        self.address = buffer.address
        self.nbytes = buffer.nbytes
        pins.begin(self, self.address, buffer._block_bytes)

    def __repr__(self) -> str:
        return f"<asyncmem.pool.Pin of {self.nbytes} bytes at {self.address:#x}{'' if self.active else ': ended'}>"

    @property
    def active(self) -> bool:
        """Whether it still holds."""
        return self._export is not None

    def unpin(self) -> None:
        """Let go. Twice is fine; from any thread."""
        self._pins.end(self)
        self._export = None

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Let go."""
        self.unpin()

    def __del__(self) -> None:
        if getattr(self, "_export", None) is not None:
            self.unpin()
