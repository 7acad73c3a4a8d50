"""AMD GPUs, through the HIP runtime: `device` is the whole, the other files are its parts; this only re-exports.

No hardware has run this yet: it is tried over a fake library (`docs/how-to/use-rocm.md`).
"""

from asyncmem.devices.rocm.device import Rocm
from asyncmem.devices.rocm.fence import RocmFence
from asyncmem.devices.rocm.pinned import RocmPinned
from asyncmem.devices.rocm.stream import RocmStream

__all__ = ["Rocm", "RocmFence", "RocmPinned", "RocmStream"]
