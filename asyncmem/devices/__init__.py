"""Devices: what owns memory and streams. `base` is the contract; this file only re-exports."""

from asyncmem.devices.base import Device, Fence, MemoryInfo, Segment, Stream
from asyncmem.devices.cuda import Cuda
from asyncmem.devices.discovery import DeviceInfo, device, devices, select_device_for
from asyncmem.devices.fences import Joined
from asyncmem.devices.gpu.fence import GpuFence
from asyncmem.devices.gpu.segments import GpuPinned
from asyncmem.devices.gpu.stream import GpuStream
from asyncmem.devices.host import Host, HostStream, Work
from asyncmem.devices.metal import Metal, MetalFence, MetalStream
from asyncmem.devices.opencl import OpenCL, OpenCLFence, OpenCLPinned, OpenCLStream
from asyncmem.devices.rocm import Rocm
from asyncmem.devices.simulated.calls import Call, Latencies
from asyncmem.devices.simulated.device import Simulated
from asyncmem.devices.simulated.order import StreamOrderError
from asyncmem.devices.simulated.stream import SimulatedFence, SimulatedGraph, SimulatedStream
from asyncmem.devices.streams import StreamBook

__all__ = [
    "Call",
    "Cuda",
    "Device",
    "DeviceInfo",
    "Fence",
    "GpuFence",
    "GpuPinned",
    "GpuStream",
    "Host",
    "HostStream",
    "Joined",
    "Latencies",
    "MemoryInfo",
    "Metal",
    "MetalFence",
    "MetalStream",
    "OpenCL",
    "OpenCLFence",
    "OpenCLPinned",
    "OpenCLStream",
    "Rocm",
    "Segment",
    "Simulated",
    "SimulatedFence",
    "SimulatedGraph",
    "SimulatedStream",
    "Stream",
    "StreamBook",
    "StreamOrderError",
    "Work",
    "device",
    "devices",
    "select_device_for",
]
