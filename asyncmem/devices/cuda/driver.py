"""CUDA's driver through `cuda.bindings`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, final

from asyncmem.devices.cuda.interface import CUDA
from asyncmem.devices.gpu.driver import Driver
from asyncmem.devices.gpu.interface import INSTEAD
from asyncmem.errors import BackendUnavailable

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import ModuleType

    from asyncmem.devices.gpu._calls import Context

_KEEP_ALL: Final = (1 << 64) - 1


@final
class CudaDriver(Driver):
    """CUDA's driver as one device calls it."""

    joins_mappings = True

    def __init__(self, device: str) -> None:
        """Serve the device of that name, once the driver is started."""
        super().__init__(CUDA, device)

    def import_bindings(self, device: str) -> ModuleType:
        """Import `cuda.bindings`."""
        try:
            from cuda.bindings import driver  # type: ignore[import-untyped]  # it ships without types
        except ImportError as error:
            raise BackendUnavailable(
                device, tried=(f"cuda.bindings: {error}",), install=f"pip install cuda-python. {INSTEAD}"
            ) from None
        module: ModuleType = driver
        return module

    def known_attribute(self, name: str, address: int) -> int:
        """Ask for an attribute of memory at an address."""
        kind = getattr(self._bindings.CUpointer_attribute, f"CU_POINTER_ATTRIBUTE_{name}")
        return int(self.call("cuPointerGetAttribute", kind, address))

    def attribute(self, name: str, device: int) -> int:
        """Ask for a device's attribute; what this package does not know, no device has."""
        known = getattr(self._bindings.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}", None)
        return 0 if known is None else int(self.call("cuDeviceGetAttribute", known, device))

    def granularity(self, device: int) -> int:
        """Ask for the unit of physical memory, in bytes."""
        properties = self._bindings.CUmemAllocationProp()
        properties.type = self._bindings.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.location = self.location(device)
        least = self._bindings.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        return int(self.call("cuMemGetAllocationGranularity", properties, least))

    def create_pool(self, device: int) -> object:
        """Make a memory pool that keeps what is free."""
        properties = self._bindings.CUmemPoolProps()
        properties.allocType = self._bindings.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.location = self.location(device)
        pool: object = self.call("cuMemPoolCreate", properties)
        threshold = self._bindings.CUmemPool_attribute.CU_MEMPOOL_ATTR_RELEASE_THRESHOLD
        try:
            self.call("cuMemPoolSetAttribute", pool, threshold, self._bindings.cuuint64_t(_KEEP_ALL))
        except BaseException:
            self.call("cuMemPoolDestroy", pool)
            raise
        return pool

    def open_pool(self, pool: object, devices: Sequence[int], *, allowed: bool = True) -> None:
        """Let devices use all that a memory pool gives out, or no longer."""
        flags = self._bindings.CUmemAccess_flags
        descriptions = []
        for device in devices:
            one = self._bindings.CUmemAccessDesc()
            one.location = self.location(device)
            one.flags = flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE if allowed else flags.CU_MEM_ACCESS_FLAGS_PROT_NONE
            descriptions.append(one)
        self.call("cuMemPoolSetAccess", pool, descriptions, len(descriptions))

    def home(self, context: Context) -> object:
        """Answer the context itself."""
        return context.handle

    def location(self, device: int) -> object:
        """Describe a device as a place of memory."""
        location = self._bindings.CUmemLocation()
        location.type = self._bindings.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        location.id = device
        return location
