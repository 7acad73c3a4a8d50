"""Fences of a ROCm device."""

from __future__ import annotations

from typing import TYPE_CHECKING

from asyncmem.devices.gpu.fence import GpuFence

if TYPE_CHECKING:
    from asyncmem.devices.rocm.device import Rocm


class RocmFence(GpuFence):
    """A HIP event, recorded once. It keeps the device's context; the event serves the next fence afterwards."""

    device: Rocm
