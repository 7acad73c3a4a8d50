"""Streams of a ROCm device."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

from asyncmem.devices.gpu.stream import GpuStream, ThreadStream
from asyncmem.devices.rocm.fence import RocmFence

if TYPE_CHECKING:
    from asyncmem.devices.rocm.device import Rocm


class RocmStream(GpuStream[RocmFence]):
    """A HIP stream. One that the device made is destroyed with this object, after its work."""

    device: Rocm


@final
class RocmThreadStream(ThreadStream[RocmFence], RocmStream):
    """The default stream of one thread."""

    device: Rocm
