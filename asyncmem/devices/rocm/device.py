"""One AMD GPU as a device."""

from __future__ import annotations

from asyncmem.devices.gpu.device import Gpu
from asyncmem.devices.rocm.driver import HipDriver
from asyncmem.devices.rocm.fence import RocmFence
from asyncmem.devices.rocm.interface import HIP
from asyncmem.devices.rocm.pinned import RocmPinned
from asyncmem.devices.rocm.stream import RocmStream, RocmThreadStream


class Rocm(Gpu[RocmStream, RocmFence, RocmPinned]):
    """An AMD GPU, through the HIP runtime and hip-python. It has run over a fake library, and on no hardware yet.

    It works with the device as a whole, as torch and CuPy for ROCm do, so memory and streams may be shared with them,
    where they use the same copy of the runtime. Any number of these may exist for one GPU. Nothing is released at the
    interpreter's exit, and a forked child may not use the device.

    A lost device raises `DeviceError` from every call, and its fences from every wait. To drop a stream of the device's
    own may **block** until its work is done: so HIP destroys streams.

    Attributes:
        gives_notices: False: HIP does not tell when this process has more of the memory than it should.
    """

    kind = "rocm"
    interface = HIP
    dlpack_type = 10  # kDLROCM
    driver_kind = HipDriver
    stream_kind = RocmStream
    fence_kind = RocmFence
    pinned_kind = RocmPinned

    def __init__(self, index: int = 0, *, segments: str = "auto") -> None:
        """Start the runtime (blocks, for up to some seconds where nobody has done so before).

        Args:
            index: Which of the devices that this process may see (`HIP_VISIBLE_DEVICES`).
            segments: How memory is got from the runtime: "virtual" maps physical pieces, "stream_ordered" uses a memory
                pool of HIP's, "direct" is hipMalloc. "auto" takes the first of these that the device has.

        Raises:
            InvalidRequest: `index` is negative, or there is no such kind of segments on this device.
            BackendUnavailable: There is no hip-python, no HIP runtime, no such GPU, or HIP is older than 6.0.
            DeviceError: The runtime fails.
        """
        super().__init__(index, segments=segments)

    def this_threads_stream(self) -> RocmThreadStream:
        """Make the stream that stands for the calling thread's default one."""
        return RocmThreadStream(self)
