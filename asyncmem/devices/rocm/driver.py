"""HIP's runtime through hip-python."""

from __future__ import annotations

import ctypes
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final, final

from asyncmem.devices.gpu.driver import Driver
from asyncmem.devices.rocm.interface import HIP, PACKAGE
from asyncmem.devices.rocm.library import loaded_copies
from asyncmem.errors import BackendUnavailable

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import ModuleType

    from asyncmem.devices.gpu._calls import Context

_KEEP_ALL: Final = (1 << 64) - 1


@final
class HipDriver(Driver):
    """HIP's runtime as one device calls it."""

    # Releases of ROCm differ in whether a call may be for more than one mapping, and some crash at it.
    joins_mappings = False

    def __init__(self, device: str) -> None:
        """Serve the device of that name, once the runtime is started."""
        super().__init__(HIP, device)

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

    def granularity(self, device: int) -> int:
        """Ask for the unit of physical memory, in bytes."""
        properties = self._bindings.hipMemAllocationProp()
        properties.type = self._bindings.hipMemAllocationType.hipMemAllocationTypePinned
        self._fill(properties.location, device)
        least = self._bindings.hipMemAllocationGranularity_flags.hipMemAllocationGranularityMinimum
        return int(self.call("cuMemGetAllocationGranularity", properties, least))

    def create_pool(self, device: int) -> object:
        """Make a memory pool that keeps what is free."""
        properties = self._bindings.hipMemPoolProps()
        properties.allocType = self._bindings.hipMemAllocationType.hipMemAllocationTypePinned
        self._fill(properties.location, device)
        pool: object = self.call("cuMemPoolCreate", properties)
        threshold = self._bindings.hipMemPoolAttr.hipMemPoolAttrReleaseThreshold
        try:
            self.call("cuMemPoolSetAttribute", pool, threshold, ctypes.addressof(ctypes.c_uint64(_KEEP_ALL)))
        except BaseException:
            self.call("cuMemPoolDestroy", pool)
            raise
        return pool

    def open_pool(self, pool: object, devices: Sequence[int], *, allowed: bool = True) -> None:
        """Let devices use all that a memory pool gives out. HIP takes such a grant back from nobody."""
        for device in devices if allowed else ():
            one = self._bindings.hipMemAccessDesc()
            one.flags = self._bindings.hipMemAccessFlags.hipMemAccessFlagsProtReadWrite
            self._fill(one.location, device)
            self.call("cuMemPoolSetAccess", pool, one, 1)

    def home(self, context: Context) -> object:
        """Answer the number of the device: HIP has no contexts."""
        return context.device

    def location(self, device: int) -> object:
        """Describe a device as a place of memory."""
        return self._fill(self._bindings.hipMemLocation(), device)

    def _fill(self, location: Any, device: int) -> object:  # noqa: ANN401  # the package has no types
        location.type = self._bindings.hipMemLocationType.hipMemLocationTypeDevice
        location.id = device
        place: object = location
        return place
