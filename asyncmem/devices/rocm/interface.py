"""HIP's runtime: where it is found, what it calls what CUDA has too, and what its errors mean."""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import TYPE_CHECKING, Final, final

from asyncmem.devices.gpu.interface import (
    COMMON_ADVICE,
    CONTEXT_IS_DESTROYED,
    DEINITIALIZED,
    INSTEAD,
    LOST_CODES,
    NOT_FOUND,
    NOT_INITIALIZED,
    Interface,
)
from asyncmem.devices.rocm.library import places
from asyncmem.errors import BackendUnavailable

if TYPE_CHECKING:
    from asyncmem.devices.gpu._calls import Library

OLDEST: Final = 60_000_000
"""HIP 6.0: before it, kinds of memory had other numbers."""

PACKAGE: Final = f"pip install 'asyncmem[rocm]'. {INSTEAD}"
_RUNTIME: Final = (
    f"Install AMD's driver and ROCm 6.0 or later, and set ROCM_PATH where it is not in /opt/rocm. {INSTEAD}"
)

_LOST: Final = (
    "The GPU has failed, and all that was on it is lost until the process is started anew. A kernel did this: run with "
    "AMD_SERIALIZE_KERNEL=3 to see which"
)

_OTHERWISE: Final = {
    "cuCtxEnablePeerAccess": "hipDeviceEnablePeerAccess",
    "cuCtxDisablePeerAccess": "hipDeviceDisablePeerAccess",
    "cuCtxPushCurrent": "hipSetDevice",
    "cuCtxRecordEvent": "hipEventRecord",
    "cuDeviceGetCount": "hipGetDeviceCount",
    "cuDevicePrimaryCtxRetain": "hipDeviceGet",
    "cuEventCreate": "hipEventCreateWithFlags",
    "cuMemAlloc": "hipMalloc",
    "cuMemAllocFromPoolAsync": "hipMallocFromPoolAsync",
    "cuMemFree": "hipFree",
    "cuMemFreeAsync": "hipFreeAsync",
    "cuMemFreeHost": "hipHostFree",
    "cuMemHostAlloc": "hipHostMalloc",
    "cuStreamCreate": "hipStreamCreateWithFlags",
    "cuStreamGetCtx": "hipStreamGetDevice",
}
"""Calls whose names differ by more than their first letters."""
_USELESS: Final = {
    35: "the installed kernel driver is too old",
    100: "the runtime sees no GPU",
    101: "the runtime sees no GPU",
}
_NAMES: Final = {NOT_INITIALIZED: "hipErrorNotInitialized", DEINITIALIZED: "hipErrorDeinitialized"}
_ADVICE: Final = {
    **COMMON_ADVICE,
    CONTEXT_IS_DESTROYED: "Somebody has reset the device or destroyed the stream",
    **dict.fromkeys(LOST_CODES, _LOST),
    NOT_FOUND: "The HIP runtime is older than what this needs; install a newer ROCm",
}


@final
class HipInterface(Interface):
    """CUDA's driver interface as HIP has it, from `libamdhip64.so`."""

    kind = "rocm"
    name = "ROCm"
    useless = _USELESS
    names = _NAMES
    advice = _ADVICE

    def load(self, library: Library, device: str) -> None:
        """Load the runtime, for whose calls by name hip-python must be there; it must not be older than `OLDEST`."""
        if find_spec("hip") is None:
            raise BackendUnavailable(device, tried=("hip-python: it is not installed",), install=PACKAGE)
        missing = ""
        for place in places():
            missing = library.load_hip(os.fsencode(place))
            if not missing:
                break
        else:
            raise BackendUnavailable(device, tried=(missing,), install=_RUNTIME)
        version = library.version()
        if 0 < version < OLDEST:
            found = f"the installed runtime, which is HIP {version // 10_000_000}.{version // 100_000 % 100}"
            raise BackendUnavailable(device, tried=(found,), install=_RUNTIME)

    def hidden(self) -> tuple[str, ...]:
        """Answer which of the variables that choose devices are set; HIP reads CUDA's too."""
        variables = ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
        found = ((one, os.environ.get(one)) for one in variables)
        return tuple(f"{one} is {value!r}, which hides all others" for one, value in found if value is not None)

    def symbol(self, call: str) -> str:
        """Answer HIP's name for a call of CUDA's."""
        return _OTHERWISE.get(call) or "hip" + call.removeprefix("cu")


HIP: Final = HipInterface()
"""The one that there is."""
