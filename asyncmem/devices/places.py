"""Whose memory an address is: some protocols give away no more of it."""

from asyncmem.devices.cuda import Cuda
from asyncmem.devices.rocm import Rocm
from asyncmem.errors import BackendUnavailable, DeviceError


def gpu_at(address: int) -> tuple[int, int]:
    """Return DLPack's type and number of the GPU that has the memory at `address` (blocks at the first need).

    Raises:
        BackendUnavailable: No GPU can be used here.
        DeviceError: The drivers know of no such memory.
    """
    refusals: list[BackendUnavailable | DeviceError] = []
    for kind in (Cuda, Rocm):
        try:
            return kind.dlpack_type, kind.index_of(address)
        except (BackendUnavailable, DeviceError) as refusal:
            refusals.append(refusal)
    raise refusals[0]
