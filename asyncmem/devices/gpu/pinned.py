"""Page-locked host memory, as a device beside the GPU whose copies use it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from asyncmem.devices.gpu.segments import Segments, SingleCalls
from asyncmem.devices.host_memory import PAGE, HostMemory, total_memory

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asyncmem.devices.base import Device, Segment, Stream
    from asyncmem.devices.gpu._calls import Context
    from asyncmem.devices.gpu.device import Gpu
    from asyncmem.devices.gpu.driver import Driver
    from asyncmem.devices.gpu.segments import Source
    from asyncmem.errors import DeviceError

_PORTABLE_AND_MAPPED: Final = 3  # on ROCm that is coherent, too: behind a fence the host sees what was written


def page_locked(name: str, driver: Driver, context: Context) -> Segments:
    """Return the segments of a GPU's page-locked memory, of which there are none yet."""

    def make(_kind: str) -> Source:
        return SingleCalls(driver, "cuMemHostAlloc", "cuMemFreeHost", _PORTABLE_AND_MAPPED)

    return Segments(name, driver, context, GpuPinned.segment_kinds, make, unit=PAGE, most=total_memory())


class GpuPinned(HostMemory):
    """Page-locked memory of the host. Get it by the GPU's `pinned()`.

    The GPU's copies in both directions need no detour here and never block; kernels may use its addresses too, at the
    speed of the bus.
    """

    segment_kinds = ("pinned", "direct")
    owner: Gpu

    def __init__(self, owner: Gpu) -> None:
        """Use the GPU's `pinned` instead."""
        self.kind = f"{owner.kind}_pinned"
        self.dlpack_device = (owner.dlpack_pinned_type, 0)
        super().__init__(owner, owner.index)
        self.fence_calls = owner.fence_calls

    @property
    def over_budget(self) -> int:  # type: ignore[override]  # the contract's is an attribute, here it is asked for
        """How often the driver has said that less memory is left for this process than it has."""
        return self.owner.over_budget

    def allocate_segment(self, nbytes: int, kind: str = "auto", stream: Stream | None = None) -> Segment:
        """Lock fresh pages (blocks, for about a tenth of a millisecond a megabyte); usable by every stream at once."""
        self.owner.check_open()
        return self.owner.locked.take(nbytes, kind, self.owner.stream_of(stream).handle)

    def free_segment(self, segment: Segment) -> None:
        """Give the pages back (blocks)."""
        self.owner.locked.give_back(segment)

    def grant_access(self, peers: Sequence[Device]) -> None:
        """Do nothing for other devices of the vendor's: page-locked memory is there for all of them.

        Raises:
            InvalidRequest: One of `peers` is another kind of device.
        """
        self.owner.gpu_peers(peers)

    def fence_error(self, call: str, code: int) -> DeviceError:
        """Make the error for a code of the driver's."""
        return self.owner.fence_error(call, code)
