"""One NVIDIA GPU as a device, through CUDA's driver: how old that may be, its errors, its calls by `cuda.bindings`."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Final, final

from asyncmem.devices.base import INSTEAD
from asyncmem.devices.gpu.device import Gpu
from asyncmem.devices.gpu.driver import COMMON_ADVICE, DEINITIALIZED, LOST_CODES, NOT_FOUND, NOT_INITIALIZED, Driver
from asyncmem.errors import BackendUnavailable

if TYPE_CHECKING:
    from types import ModuleType

    from asyncmem.devices.gpu._calls import Context, Library
    from asyncmem.devices.gpu.shared import SharedCuda

OLDEST: Final = 12_040

_LOST: Final = (
    "The GPU's context is lost, and with it everything in it, until the process is started anew. A kernel did this: "
    "run under compute-sanitizer, or with CUDA_LAUNCH_BLOCKING=1, to see which"
)


@final
class CUDA(Driver):
    """CUDA's driver, from `libcuda.so.1`."""

    kind = "cuda"
    name = "CUDA"
    install = f"Install an NVIDIA driver for CUDA {OLDEST // 1000}.{OLDEST % 1000 // 10} or later (R550). {INSTEAD}"
    oldest = OLDEST
    selectors = ("CUDA_VISIBLE_DEVICES",)
    useless: ClassVar = {
        34: "the driver is a stub to link with: a directory of stubs is on the library path",
        35: "the installed driver is too old",
        100: "the driver sees no GPU",
        803: "the driver and its kernel module are of different versions: a reboot loads the newer one",
        804: "this GPU cannot run the compatibility driver that is installed",
    }
    names: ClassVar = {NOT_INITIALIZED: "CUDA_ERROR_NOT_INITIALIZED", DEINITIALIZED: "CUDA_ERROR_DEINITIALIZED"}
    advice: ClassVar = {
        **COMMON_ADVICE,
        46: "Another process has the GPU for itself: see its compute mode in nvidia-smi",
        **dict.fromkeys(LOST_CODES, _LOST),
        NOT_FOUND: "The driver is older than what this needs; install a newer one",
    }
    joins_mappings = True
    has_checkers = True

    @classmethod
    def load(cls, library: Library, device: str) -> str:  # noqa: ARG003  # the same for all
        """Load the driver; return why that is not possible, or an empty string."""
        return library.load_cuda()

    @staticmethod
    def version_text(version: int) -> str:
        """Name what is installed, by its version."""
        return f"the installed driver, which is for CUDA {version // 1000}.{version % 1000 // 10}"

    def import_bindings(self, device: str) -> ModuleType:
        """Import `cuda.bindings`."""
        try:
            from cuda.bindings import driver  # type: ignore[import-untyped]  # it ships without types
        except ImportError as error:
            install = f"An NVIDIA GPU is there: pip install 'asyncmem[cuda]'. {INSTEAD}"
            raise BackendUnavailable(
                device, tried=(f"cuda-python: {error}",), install=install, package="cuda-python"
            ) from None
        module: ModuleType = driver
        return module

    def known_attribute(self, name: str, address: int) -> int:
        """Ask for an attribute of memory at an address."""
        known = self._known(f"CUpointer_attribute.CU_POINTER_ATTRIBUTE_{name}")
        return int(self.call("cuPointerGetAttribute", known, address))

    def attribute(self, name: str, device: int) -> int:
        """Ask for a device's attribute; what this package does not know, no device has."""
        known = getattr(self._bindings.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}", None)
        return 0 if known is None else int(self.call("cuDeviceGetAttribute", known, device))

    def set_threshold(self, pool: object, attribute: object, nbytes: int) -> None:
        """Set how much a memory pool keeps."""
        self.call("cuMemPoolSetAttribute", pool, attribute, self._bindings.cuuint64_t(nbytes))

    def home(self, context: Context) -> object:
        """Return the context itself."""
        return context.handle


class Cuda(Gpu):
    """An NVIDIA GPU, through its driver alone, for CUDA 12.4 or later: no toolkit is needed.

    It uses the device's primary context, as torch, CuPy and numba do, so memory and streams may be shared with them.
    Any number of these may exist for one GPU; they share the context, which is released once they are closed and the
    last of their segments, streams and fences is gone. Nothing is released at the interpreter's exit, and a forked
    child may not use the device.

    A device that is not closed keeps its context; a lost one raises `DeviceError` from every call, and its fences from
    every wait.

    Attributes:
        gives_notices: Whether the driver tells when this process has more of the memory than it should.
    """

    kind = "cuda"
    interface = CUDA
    dlpack_type = 2  # kDLCUDA
    dlpack_pinned_type = 3  # kDLCUDAHost
    taken_at_once = 64 << 10
    joins_segments = True

    @property
    def identity(self) -> str:
        """Its UUID, because each process may number the GPUs in its own way."""
        return self._identity_of(self.index)

    def shareable(self) -> SharedCuda:
        """Return memory of this GPU that other processes can open, by cuda.core (blocks).

        Raises:
            BackendUnavailable: cuda.core is not there, or the driver has no such memory.
        """
        from asyncmem.devices.gpu.shared import SharedCuda

        return SharedCuda(self)

    @classmethod
    def with_identity(cls, identity: str) -> int | None:
        """Return the index of a GPU by its identity, None where this process does not see it.

        Raises:
            BackendUnavailable: CUDA cannot be used here.
        """
        cls.interface.start(cls.kind)
        found = (index for index in range(cls.interface.count_devices()) if cls._identity_of(index) == identity)
        return next(found, None)

    @classmethod
    def _identity_of(cls, index: int) -> str:
        uuid = cls.interface(f"{cls.kind}:{index}").call("cuDeviceGetUuid", index)
        return f"{cls.kind}-{bytes(uuid.bytes).hex()}"
