"""CUDA's driver: how old it may be, and what its errors mean."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final, final

from asyncmem.devices.gpu.interface import (
    COMMON_ADVICE,
    DEINITIALIZED,
    INSTEAD,
    LOST_CODES,
    NOT_FOUND,
    NOT_INITIALIZED,
    Interface,
)
from asyncmem.errors import BackendUnavailable

if TYPE_CHECKING:
    from asyncmem.devices.gpu._calls import Library

OLDEST: Final = 12_040

_UPDATE: Final = f"Install an NVIDIA driver for CUDA {OLDEST // 1000}.{OLDEST % 1000 // 10} or later (R550). {INSTEAD}"
_LOST: Final = (
    "The GPU's context is lost, and with it everything in it, until the process is started anew. A kernel did this: "
    "run under compute-sanitizer, or with CUDA_LAUNCH_BLOCKING=1, to see which"
)
_USELESS: Final = {
    34: "the driver is a stub to link with: a directory of stubs is on the library path",
    35: "the installed driver is too old",
    100: "the driver sees no GPU",
    803: "the driver and its kernel module are of different versions: a reboot loads the newer one",
    804: "this GPU cannot run the compatibility driver that is installed",
}
_NAMES: Final = {NOT_INITIALIZED: "CUDA_ERROR_NOT_INITIALIZED", DEINITIALIZED: "CUDA_ERROR_DEINITIALIZED"}
_ADVICE: Final = {
    **COMMON_ADVICE,
    46: "Another process has the GPU for itself: see its compute mode in nvidia-smi",
    **dict.fromkeys(LOST_CODES, _LOST),
    NOT_FOUND: "The driver is older than what this needs; install a newer one",
}


@final
class CudaInterface(Interface):
    """CUDA's driver interface, from `libcuda.so.1`."""

    kind = "cuda"
    name = "CUDA"
    useless = _USELESS
    names = _NAMES
    advice = _ADVICE

    def load(self, library: Library, device: str) -> None:
        """Load the driver, which must not be older than `OLDEST`."""
        missing = library.load_cuda()
        if missing:
            raise BackendUnavailable(device, tried=(missing,), install=_UPDATE)
        version = library.version()
        if 0 < version < OLDEST:
            found = f"the installed driver, which is for CUDA {version // 1000}.{version % 1000 // 10}"
            raise BackendUnavailable(device, tried=(found,), install=_UPDATE)

    def hidden(self) -> tuple[str, ...]:
        """Answer what `CUDA_VISIBLE_DEVICES` is, if it is anything."""
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        return () if visible is None else (f"CUDA_VISIBLE_DEVICES is {visible!r}, which hides all others",)


CUDA: Final = CudaInterface()
"""The one that there is."""
