"""Host memory that an OpenCL device reads and writes directly, as a device beside it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from asyncmem.devices.beside import HostMemory
from asyncmem.devices.opencl.segments import Segments

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asyncmem.devices.base import Device, Segment, Stream
    from asyncmem.devices.opencl.device import OpenCL

PINNED_KINDS: Final = ("pinned", "direct")


class OpenCLPinned(HostMemory):
    """Fine-grained shared memory, which host and device may touch at any time. Get it by `OpenCL.pinned()`."""

    kind = "opencl_pinned"
    segment_kinds = PINNED_KINDS
    dlpack_device = (1, 0)  # kDLCPU
    owner: OpenCL

    def __init__(self, owner: OpenCL) -> None:
        """Use `OpenCL.pinned` instead."""
        super().__init__(owner, owner.index)
        self._segments = Segments(self.name, owner.driver, owner.place, PINNED_KINDS, fine=True)

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

    def grant_access(self, peers: Sequence[Device]) -> None:
        """Do nothing for the owner and its like: they share the context."""
        self.owner.grant_access(peers)
