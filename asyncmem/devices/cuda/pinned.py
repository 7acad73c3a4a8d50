"""Page-locked host memory, as a device beside the GPU whose copies use it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from asyncmem.devices.base import Device, MemoryInfo, Segment, Stream
from asyncmem.devices.cuda.direct import PageLocked
from asyncmem.devices.cuda.segments import Segments
from asyncmem.devices.pages import PAGE, host_memory, total_memory

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asyncmem.devices.cuda.device import Cuda
    from asyncmem.devices.cuda.fence import CudaFence
    from asyncmem.devices.cuda.stream import CudaStream
    from asyncmem.errors import DeviceError


class CudaPinned(Device):
    """Page-locked memory of the host. Get it by `Cuda.pinned()`.

    A pool may be opened over it. Streams and fences are the GPU's, whose copies in both directions need no detour here
    and never block; kernels may use its addresses too, at the speed of the bus.
    """

    kind = "cuda_pinned"
    segment_kinds = ("pinned", "direct")
    granularity = PAGE
    host_readable = True

    def __init__(self, owner: Cuda) -> None:
        """Use `Cuda.pinned` instead."""
        self.owner = owner
        self.name = f"{self.kind}:{owner.index}"
        self.capacity = total_memory()
        self.dlpack_device = (3, 0)  # kDLCUDAHost
        self.default_stream: CudaStream = owner.default_stream
        self.fence_calls = owner.fence_calls
        makers = dict.fromkeys(self.segment_kinds, lambda: PageLocked(owner.driver))
        self._segments = Segments(self.name, owner.context, makers, granularity=PAGE, most=self.capacity)

    def __repr__(self) -> str:
        return f"<CudaPinned beside {self.owner.name}>"

    @property
    def driver_calls(self) -> int:
        """How many calls of the driver the GPU has had; they are counted together."""
        return self.owner.driver_calls

    @property
    def over_budget(self) -> int:  # type: ignore[override]  # the contract's is an attribute, here it is asked for
        """How often the driver has said that less memory is left for this process than it has."""
        return self.owner.over_budget

    def memory(self) -> MemoryInfo:
        """Ask the system how much host memory there is (blocks)."""
        return host_memory()

    def suggest_capacity(self, nbytes: int) -> None:
        """Ignore it: the host has a size of its own."""

    def allocate_segment(self, nbytes: int, kind: str = "auto", stream: Stream | None = None) -> Segment:
        """Lock fresh pages (blocks, for about a tenth of a millisecond a megabyte); usable by every stream at once."""
        self.owner.check_open()
        return self._segments.take(nbytes, kind, self.stream_of(stream).handle)

    def free_segment(self, segment: Segment) -> None:
        """Give the pages back (blocks)."""
        self.owner.give_back(self._segments, segment)

    def create_stream(self, name: str | None = None) -> CudaStream:
        """Make a stream of the GPU's."""
        return self.owner.create_stream(name)

    def stream_of(self, source: object) -> CudaStream:
        """Return the GPU's stream that `source` means."""
        return self.owner.stream_of(source)

    def record_all(self) -> CudaFence:
        """Return a fence behind everything submitted to every stream of the GPU."""
        return self.owner.record_all()

    def fill(self, address: int, nbytes: int, value: int, stream: Stream) -> None:
        """Have the GPU set bytes."""
        self.owner.fill(address, nbytes, value, stream)

    def copy(self, target: int, source: int, nbytes: int, stream: Stream) -> None:
        """Have the GPU copy, also from or to its own memory."""
        self.owner.copy(target, source, nbytes, stream)

    def copy_in(self, address: int, source: memoryview, stream: Stream) -> None:
        """Have the GPU copy from host memory; see `Cuda.copy_in`."""
        self.owner.copy_in(address, source, stream)

    def copy_out(self, target: memoryview, address: int, stream: Stream) -> None:
        """Have the GPU copy to host memory; see `Cuda.copy_in`."""
        self.owner.copy_out(target, address, stream)

    def copy_holds_up(self, host: memoryview, *, into: bool = False) -> bool:
        """Tell whether a copy from (`into`) or to this memory blocks."""
        return self.owner.copy_holds_up(host, into=into)

    def peer_copy(self, target: int, source: int, nbytes: int, source_device: Device, stream: Stream) -> None:
        """Have a GPU copy from its memory to here."""
        self.owner.peer_copy(target, source, nbytes, source_device, stream)

    def grant_access(self, peers: Sequence[Device]) -> None:
        """Do nothing for other CUDA devices: page-locked memory is there for all of them.

        Raises:
            InvalidRequest: One of `peers` is another kind of device.
        """
        self.owner.cuda_peers(peers)

    def pinned(self) -> CudaPinned:
        """Return this very device."""
        return self

    def fence_error(self, call: str, code: int) -> DeviceError:
        """Make the error for a code of the driver's."""
        return self.owner.fence_error(call, code)

    def close(self) -> None:
        """Do nothing: the GPU closes it."""

    def close_segments(self) -> None:
        """Be closed by the GPU (blocks)."""
        self._segments.close()
