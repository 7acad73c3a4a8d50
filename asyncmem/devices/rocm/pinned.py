"""Page-locked host memory beside a ROCm device."""

from __future__ import annotations

from typing import TYPE_CHECKING

from asyncmem.devices.gpu.pinned import GpuPinned

if TYPE_CHECKING:
    from asyncmem.devices.rocm.device import Rocm


class RocmPinned(GpuPinned):
    """Page-locked memory of the host. Get it by `Rocm.pinned()`.

    The GPU's copies in both directions need no detour here and never block; kernels may use its addresses too, at the
    speed of the bus.
    """

    kind = "rocm_pinned"
    dlpack_device = (11, 0)  # kDLROCMHost
    owner: Rocm
