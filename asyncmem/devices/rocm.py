"""One AMD GPU as a device, through HIP's runtime: where that is, how it differs from CUDA's, its calls by hip-python.

No hardware has run this yet: it is tried over a fake library (`docs/how-to/use-rocm.md`).

Wheels of torch and of ROCm bring copies of the runtime, beside the system's: all must use the same one.
"""

from __future__ import annotations

import ctypes
import os
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Final, final

from asyncmem.devices.base import INSTEAD
from asyncmem.devices.gpu.device import Gpu
from asyncmem.devices.gpu.driver import (
    COMMON_ADVICE,
    CONTEXT_IS_DESTROYED,
    DEINITIALIZED,
    LOST_CODES,
    NOT_FOUND,
    NOT_INITIALIZED,
    Driver,
)
from asyncmem.errors import BackendUnavailable

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from types import ModuleType

    from asyncmem.devices.gpu._calls import Context, Library

_NAME: Final = "libamdhip64.so"
_VERSIONS: Final = ("", ".7", ".6")
"""What follows the name: the plain one is there for those who build, the others wherever programs run."""


def loaded_copies() -> tuple[str, ...]:
    """Return the files of the runtime that are loaded in this process."""
    lines = Path("/proc/self/maps").read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    files = (line.split(maxsplit=5)[-1] for line in lines if _NAME in line)
    return tuple(dict.fromkeys(files))


def runtime_files() -> Iterator[str]:
    """Yield where the runtime may be, best first: what is loaded, then where hip-python looks for it."""
    yield from loaded_copies()
    if find_spec("rocm_sdk") is not None:
        yield from map(str, import_module("rocm_sdk").find_libraries("amdhip64"))
    root = os.environ.get("ROCM_PATH") or os.environ.get("ROCM_HOME") or "/opt/rocm"
    for version in _VERSIONS:
        file = Path(root, "lib", _NAME + version)
        if file.exists():
            yield str(file)
    yield from (_NAME + version for version in _VERSIONS)


OLDEST: Final = 60_000_000
"""HIP 6.0: before it, kinds of memory had other numbers."""

PACKAGE: Final = f"pip install 'asyncmem[rocm]'. {INSTEAD}"
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
    "CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE": "hipMemAccessFlags.hipMemAccessFlagsProtReadWrite",
    "CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM": (
        "hipMemAllocationGranularity_flags.hipMemAllocationGranularityMinimum"
    ),
    "CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED": "hipMemAllocationType.hipMemAllocationTypePinned",
    "CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE": "hipMemLocationType.hipMemLocationTypeDevice",
    "CUmemPool_attribute.CU_MEMPOOL_ATTR_RELEASE_THRESHOLD": "hipMemPoolAttr.hipMemPoolAttrReleaseThreshold",
}
"""What has a name that differs by more than its first letters."""


@final
class HIP(Driver):
    """HIP's runtime, from `libamdhip64.so`."""

    kind = "rocm"
    name = "ROCm"
    install = f"Install AMD's driver and ROCm 6.0 or later, and set ROCM_PATH where it is not in /opt/rocm. {INSTEAD}"
    oldest = OLDEST
    # HIP reads CUDA's too.
    selectors = ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
    useless: ClassVar = {
        35: "the installed kernel driver is too old",
        100: "the runtime sees no GPU",
        101: "the runtime sees no GPU",
    }
    names: ClassVar = {NOT_INITIALIZED: "hipErrorNotInitialized", DEINITIALIZED: "hipErrorDeinitialized"}
    advice: ClassVar = {
        **COMMON_ADVICE,
        CONTEXT_IS_DESTROYED: "The device was reset, or the stream destroyed",
        **dict.fromkeys(LOST_CODES, _LOST),
        NOT_FOUND: "The HIP runtime is older than what this needs; install a newer ROCm",
    }
    # Releases of ROCm differ in whether a call may be for more than one mapping, and some crash at it.
    joins_mappings = False
    has_checkers = False

    @classmethod
    def load(cls, library: Library, device: str) -> str:
        """Load the runtime; return why that is not possible, or an empty string."""
        # Its calls by name are hip-python's.
        if find_spec("hip") is None:
            raise BackendUnavailable(device, tried=("hip-python: it is not installed",), install=PACKAGE)
        missing = ""
        for file in runtime_files():
            missing = library.load_hip(os.fsencode(file))
            if not missing:
                break
        return missing

    @staticmethod
    def version_text(version: int) -> str:
        """Name what is installed, by its version."""
        return f"the installed runtime, which is HIP {version // 10_000_000}.{version // 100_000 % 100}"

    @staticmethod
    def symbol(name: str) -> str:
        """Return HIP's name for a call, a type or a constant."""
        return _OTHERWISE.get(name) or f"hip{name[2].upper()}{name[3:]}"

    def import_bindings(self, device: str) -> ModuleType:
        """Import hip-python, and see that it calls the runtime that we call.

        Raises:
            BackendUnavailable: It is broken, or takes another copy, which would know nothing of our memory.
        """
        try:
            module: ModuleType = import_module("hip").hip
            module.hipDriverGetVersion()
        except (ImportError, RuntimeError) as error:
            raise BackendUnavailable(device, tried=(f"hip-python: {error}",), install=PACKAGE) from None
        copies = loaded_copies()
        if len(copies) > 1:
            raise BackendUnavailable(
                device,
                tried=(f"this process, which has several copies of HIP's runtime: {', '.join(copies)}",),
                install="Set ROCM_PATH to the folder whose lib folder has the copy that all are to use",
            )
        return module

    def known_attribute(self, name: str, address: int) -> int:
        """Ask for an attribute of memory at an address."""
        answer = ctypes.c_int()
        kind = getattr(self._bindings.hipPointer_attribute, f"HIP_POINTER_ATTRIBUTE_{name}")
        self.call("cuPointerGetAttribute", ctypes.addressof(answer), kind, address)
        return answer.value

    def attribute(self, name: str, device: int) -> int:
        """Ask for a device's attribute, which HIP writes in another way; what this package does not know, none has."""
        plain = "".join(map(str.capitalize, name.split("_")))
        known = getattr(self._bindings.hipDeviceAttribute_t, f"hipDeviceAttribute{plain}", None)
        return 0 if known is None else int(self.call("cuDeviceGetAttribute", known, device))

    def set_threshold(self, pool: object, attribute: object, nbytes: int) -> None:
        """Set how much a memory pool keeps."""
        value = ctypes.c_uint64(nbytes)
        self.call("cuMemPoolSetAttribute", pool, attribute, ctypes.addressof(value))

    def open_pool(self, pool: object, devices: Sequence[int], *, allowed: bool = True) -> None:
        """Let devices use all memory of a pool. HIP cannot revoke this."""
        for device in devices if allowed else ():
            self.call("cuMemPoolSetAccess", pool, self.access(device), 1)

    def home(self, context: Context) -> object:
        """Return the number of the device: HIP has no contexts."""
        return context.device


class Rocm(Gpu):
    """An AMD GPU, through the HIP runtime (6.0) and hip-python. It has run over a fake library, and on no hardware yet.

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
    dlpack_pinned_type = 11  # kDLROCMHost
