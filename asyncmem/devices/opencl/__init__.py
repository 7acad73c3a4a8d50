"""Devices of OpenCL, through pyopencl: `device` is the whole, the other files are its parts; this only re-exports."""

from asyncmem.devices.opencl.device import OpenCL, OpenCLFence, OpenCLPinned, OpenCLStream

__all__ = ["OpenCL", "OpenCLFence", "OpenCLPinned", "OpenCLStream"]
