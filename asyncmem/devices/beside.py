"""Memory of the host, as a device beside another one whose streams and copies use it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from asyncmem.devices.base import Device, MemoryInfo
from asyncmem.devices.pages import PAGE, host_memory, total_memory

if TYPE_CHECKING:
    from typing import Self

    from asyncmem.devices.base import Fence, Stream


class HostMemory(Device):
    """What all kinds of it do alike. They say where their segments come from, and which peers they know.

    A pool may be opened over it. Streams and fences are the owner's, and so is all work; it lives as long as the owner.

    Attributes:
        owner: The other device.
    """

    granularity = PAGE
    host_readable = True

    def __init__(self, owner: Device, index: int) -> None:
        """Serve a device, which is the so many-th of its kind."""
        self.owner = owner
        self.name = f"{self.kind}:{index}"
        self.capacity = total_memory()
        self.default_stream = owner.default_stream

    def __repr__(self) -> str:
        return f"<{type(self).__name__} beside {self.owner.name}>"

    @property
    def driver_calls(self) -> int:
        """How many calls of the driver the owner has made; they are counted together."""
        return self.owner.driver_calls

    def memory(self) -> MemoryInfo:
        """Ask the system how much host memory there is (blocks)."""
        return host_memory()

    def suggest_capacity(self, nbytes: int) -> None:
        """Ignore it: the host has a size of its own."""

    def create_stream(self, name: str | None = None) -> Stream:
        """Make a stream of the owner's."""
        return self.owner.create_stream(name)

    def stream_of(self, source: object) -> Stream:
        """Return the owner's stream that `source` means."""
        return self.owner.stream_of(source)

    def record_all(self) -> Fence:
        """Return a fence behind everything submitted to every stream of the owner."""
        return self.owner.record_all()

    def begin_captures(self) -> None:
        """Let the owner hear of it."""
        self.owner.begin_captures()

    def end_captures(self) -> None:
        """Let the owner hear of it."""
        self.owner.end_captures()

    def fill(self, address: int, nbytes: int, value: int, stream: Stream) -> None:
        """Have the owner set bytes."""
        self.owner.fill(address, nbytes, value, stream)

    def copy(self, target: int, source: int, nbytes: int, stream: Stream) -> None:
        """Have the owner copy, also from or to its own memory."""
        self.owner.copy(target, source, nbytes, stream)

    def copy_in(self, address: int, source: memoryview, stream: Stream) -> None:
        """Have the owner copy from host memory, as its own `copy_in` does."""
        self.owner.copy_in(address, source, stream)

    def copy_out(self, target: memoryview, address: int, stream: Stream) -> None:
        """Have the owner copy to host memory, as its own `copy_out` does."""
        self.owner.copy_out(target, address, stream)

    def copy_holds_up(self, host: memoryview, *, into: bool = False) -> bool:
        """Tell whether a copy from (`into`) or to this memory blocks."""
        return self.owner.copy_holds_up(host, into=into)

    def peer_copy(self, target: int, source: int, nbytes: int, source_device: Device, stream: Stream) -> None:
        """Have the owner copy from its memory, or a peer's, to here."""
        self.owner.peer_copy(target, source, nbytes, source_device, stream)

    def pinned(self) -> Self:
        """Return this very device."""
        return self

    def close(self) -> None:
        """Do nothing: the owner closes."""
