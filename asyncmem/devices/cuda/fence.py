"""Fences of a CUDA device."""

from __future__ import annotations

from typing import TYPE_CHECKING

from asyncmem.devices.gpu.fence import GpuFence

if TYPE_CHECKING:
    from asyncmem.devices.cuda.device import Cuda


class CudaFence(GpuFence):
    """A CUDA event, recorded once. It keeps the device's context; the event serves the next fence afterwards."""

    device: Cuda
