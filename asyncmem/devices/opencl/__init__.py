"""Devices of OpenCL, through pyopencl: `device` is the whole, the other files are its parts; this only re-exports."""

from asyncmem.devices.opencl.device import OpenCL
from asyncmem.devices.opencl.fence import OpenCLFence
from asyncmem.devices.opencl.pinned import OpenCLPinned
from asyncmem.devices.opencl.stream import OpenCLStream

__all__ = ["OpenCL", "OpenCLFence", "OpenCLPinned", "OpenCLStream"]
