"""Streams of a CUDA device."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

from asyncmem.devices.cuda.fence import CudaFence
from asyncmem.devices.gpu.stream import GpuStream, ThreadStream

if TYPE_CHECKING:
    from asyncmem.devices.cuda.device import Cuda


class CudaStream(GpuStream[CudaFence]):
    """A CUDA stream. One that the device made is destroyed with this object, after its work."""

    device: Cuda


@final
class CudaThreadStream(ThreadStream[CudaFence], CudaStream):
    """The default stream of one thread."""

    device: Cuda
