"""NVIDIA GPUs, through the driver alone: `device` is the whole, the other files are its parts; this only re-exports."""

from asyncmem.devices.cuda.device import Cuda
from asyncmem.devices.cuda.fence import CudaFence
from asyncmem.devices.cuda.pinned import CudaPinned
from asyncmem.devices.cuda.stream import CudaStream

__all__ = ["Cuda", "CudaFence", "CudaPinned", "CudaStream"]
