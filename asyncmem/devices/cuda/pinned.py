"""Page-locked host memory beside a CUDA device."""

from __future__ import annotations

from typing import TYPE_CHECKING

from asyncmem.devices.gpu.pinned import GpuPinned

if TYPE_CHECKING:
    from asyncmem.devices.cuda.device import Cuda


class CudaPinned(GpuPinned):
    """Page-locked memory of the host. Get it by `Cuda.pinned()`.

    The GPU's copies in both directions need no detour here and never block; kernels may use its addresses too, at the
    speed of the bus.
    """

    kind = "cuda_pinned"
    dlpack_device = (3, 0)  # kDLCUDAHost
    owner: Cuda
