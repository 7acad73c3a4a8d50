"""Devices: what owns memory and streams. `base` is the contract; this file only re-exports."""

from asyncmem.devices.auto import device
from asyncmem.devices.base import Device, Fence, MemoryInfo, Segment, Stream
from asyncmem.devices.calls import Call
from asyncmem.devices.choosing import DeviceInfo, devices, select_device_for
from asyncmem.devices.cuda import Cuda, CudaFence, CudaPinned, CudaStream
from asyncmem.devices.host import Host, HostStream
from asyncmem.devices.joined import Joined
from asyncmem.devices.latencies import Latencies
from asyncmem.devices.metal import Metal, MetalFence, MetalStream
from asyncmem.devices.opencl import OpenCL, OpenCLFence, OpenCLPinned, OpenCLStream
from asyncmem.devices.order import StreamOrderError
from asyncmem.devices.rocm import Rocm, RocmFence, RocmPinned, RocmStream
from asyncmem.devices.simulated import Simulated
from asyncmem.devices.simulated_graph import SimulatedGraph
from asyncmem.devices.simulated_stream import SimulatedFence, SimulatedStream
from asyncmem.devices.streams import StreamBook
from asyncmem.devices.work import Work

__all__ = [
    "Call",
    "Cuda",
    "CudaFence",
    "CudaPinned",
    "CudaStream",
    "Device",
    "DeviceInfo",
    "Fence",
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
    "RocmFence",
    "RocmPinned",
    "RocmStream",
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
