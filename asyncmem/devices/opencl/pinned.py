"""Host memory that an OpenCL device reads and writes directly, as a device beside it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from asyncmem.devices.base import Device, MemoryInfo, Segment, Stream
from asyncmem.devices.opencl.segments import Segments
from asyncmem.devices.pages import PAGE, host_memory, total_memory

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asyncmem.devices.opencl.device import OpenCL
    from asyncmem.devices.opencl.fence import OpenCLFence
    from asyncmem.devices.opencl.stream import OpenCLStream

PINNED_KINDS: Final = ("pinned", "direct")


class OpenCLPinned(Device):
    """Fine-grained shared memory, which host and device may touch at any time. Get it by `OpenCL.pinned()`.

    A pool may be opened over it. Streams and fences are the other device's.
    """

    kind = "opencl_pinned"
    segment_kinds = PINNED_KINDS
    granularity = PAGE
    host_readable = True
    dlpack_device = (1, 0)  # kDLCPU

    def __init__(self, owner: OpenCL) -> None:
        """Use `OpenCL.pinned` instead."""
        self.owner = owner
        self.name = f"{self.kind}:{owner.index}"
        self.capacity = total_memory()
        self.default_stream: OpenCLStream = owner.default_stream
        self._segments = Segments(self.name, owner.driver, owner.place, PINNED_KINDS, fine=True)

    def __repr__(self) -> str:
        return f"<OpenCLPinned beside {self.owner.name}>"

    @property
    def driver_calls(self) -> int:
        """How many calls of the driver the owner has made; they are counted together."""
        return self.owner.driver_calls

    def memory(self) -> MemoryInfo:
        """Ask the system how much host memory there is (blocks)."""
        return host_memory()

    def suggest_capacity(self, nbytes: int) -> None:
        """Ignore it: the host has a size of its own."""

    def allocate_segment(self, nbytes: int, kind: str = "auto", stream: Stream | None = None) -> Segment:
        """Get memory (blocks), usable by the host and every stream at once."""
        self.owner.check_open()
        self.stream_of(stream)
        return self._segments.take(nbytes, kind)

    def free_segment(self, segment: Segment) -> None:
        """Give a segment back (blocks)."""
        self._segments.give_back(segment)

    def holds(self, address: int, nbytes: int) -> bool:
        """Tell whether a range lies in one of its segments."""
        return self._segments.holds(address, nbytes)

    def create_stream(self, name: str | None = None) -> OpenCLStream:
        """Make a stream of the owner's."""
        return self.owner.create_stream(name)

    def stream_of(self, source: object) -> OpenCLStream:
        """Return the owner's stream that `source` means."""
        return self.owner.stream_of(source)

    def record_all(self) -> OpenCLFence:
        """Return a fence behind everything submitted to every stream of the owner."""
        return self.owner.record_all()

    def fill(self, address: int, nbytes: int, value: int, stream: Stream) -> None:
        """Have the owner set bytes."""
        self.owner.fill(address, nbytes, value, stream)

    def copy(self, target: int, source: int, nbytes: int, stream: Stream) -> None:
        """Have the owner copy, also from or to its own memory."""
        self.owner.copy(target, source, nbytes, stream)

    def copy_in(self, address: int, source: memoryview, stream: Stream) -> None:
        """Have the owner copy from host memory."""
        self.owner.copy_in(address, source, stream)

    def copy_out(self, target: memoryview, address: int, stream: Stream) -> None:
        """Have the owner copy to host memory."""
        self.owner.copy_out(target, address, stream)

    def copy_holds_up(self, host: memoryview, *, into: bool = False) -> bool:
        """Tell whether a copy from (`into`) or to this memory blocks."""
        return self.owner.copy_holds_up(host, into=into)

    def peer_copy(self, target: int, source: int, nbytes: int, source_device: Device, stream: Stream) -> None:
        """Have the owner copy from its memory to here."""
        self.owner.peer_copy(target, source, nbytes, source_device, stream)

    def grant_access(self, peers: Sequence[Device]) -> None:
        """Do nothing for the owner and its like: they share the context."""
        self.owner.grant_access(peers)

    def pinned(self) -> OpenCLPinned:
        """Return this very device."""
        return self

    def close(self) -> None:
        """Do nothing: the owner closes."""
