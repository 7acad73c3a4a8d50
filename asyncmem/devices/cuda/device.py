"""One NVIDIA GPU as a device."""

from __future__ import annotations

from typing import TYPE_CHECKING

from asyncmem.devices.cuda.annotations import attached_checker
from asyncmem.devices.cuda.driver import CudaDriver
from asyncmem.devices.cuda.fence import CudaFence
from asyncmem.devices.cuda.interface import CUDA
from asyncmem.devices.cuda.pinned import CudaPinned
from asyncmem.devices.cuda.stream import CudaStream, CudaThreadStream
from asyncmem.devices.gpu.device import Gpu

if TYPE_CHECKING:
    from asyncmem.devices.checking import MemoryChecker


class Cuda(Gpu[CudaStream, CudaFence, CudaPinned]):
    """An NVIDIA GPU, through its driver alone: no toolkit is needed.

    It uses the device's primary context, as torch, CuPy and numba do, so memory and streams may be shared with them.
    Any number of these may exist for one GPU; they share the context, which is released once they are closed and the
    last of their segments, streams and fences is gone. Nothing is released at the interpreter's exit, and a forked
    child may not use the device.

    A device that is not closed keeps its context; a lost one raises `DeviceError` from every call, and its fences from
    every wait.

    Attributes:
        gives_notices: Whether the driver tells when this process has more of the memory than it should.
    """

    kind = "cuda"
    interface = CUDA
    dlpack_type = 2  # kDLCUDA
    taken_at_once = 64 << 10
    driver_kind = CudaDriver
    stream_kind = CudaStream
    fence_kind = CudaFence
    pinned_kind = CudaPinned

    def __init__(self, index: int = 0, *, segments: str = "auto") -> None:
        """Start the driver and retain the context (blocks, for up to a second where nobody has done so before).

        Args:
            index: Which of the devices that this process may see (`CUDA_VISIBLE_DEVICES`).
            segments: How memory is got from the driver: "virtual" maps physical pieces, "stream_ordered" uses a memory
                pool of the driver's, "direct" is cuMemAlloc. "auto" takes the first of these that the device has.

        Raises:
            InvalidRequest: `index` is negative, or there is no such kind of segments on this device.
            BackendUnavailable: There is no driver, no such GPU, or the driver is older than CUDA 12.4.
            DeviceError: The driver fails, or the context was lost before.
        """
        super().__init__(index, segments=segments)

    def this_threads_stream(self) -> CudaThreadStream:
        """Make the stream that stands for the calling thread's default one."""
        return CudaThreadStream(self)

    def attached_checker(self) -> MemoryChecker | None:
        """Answer compute-sanitizer, where this process runs under it."""
        return attached_checker()
