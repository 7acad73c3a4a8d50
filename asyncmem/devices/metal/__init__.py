"""Devices of Metal, through PyObjC: `device` is the whole, the other files are its parts; this only re-exports."""

from asyncmem.devices.metal.device import Metal
from asyncmem.devices.metal.stream import MetalFence, MetalStream

__all__ = ["Metal", "MetalFence", "MetalStream"]
