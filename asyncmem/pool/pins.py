"""Handles of memory, and pins: network libraries register memory by its address and keep using it."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn, Self, final

if TYPE_CHECKING:
    from asyncmem.core import Buffer


class Handle:
    """A handle that can be neither copied nor pickled, as its memory would be given back twice."""

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
        """Let go. Twice is fine; from any thread."""
        self._pins.pop(id(self), None)
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
