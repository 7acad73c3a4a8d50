"""One device of OpenCL as all of this process share it: its context, and what is taken of its memory."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Final

from asyncmem.devices.opencl.driver import Driver, find_device, is_processor, shares_memory
from asyncmem.devices.opencl.ledger import Ledger
from asyncmem.devices.pages import total_memory

if TYPE_CHECKING:
    import pyopencl as cl


class Place:
    """A device and its context, made once in a process: addresses and events mean nothing in another context."""

    def __init__(self, driver: Driver, device: cl.Device) -> None:
        """Make the context. Get it by `find_place`."""
        self.device = device
        self.context: cl.Context = driver.call(driver.cl.Context, [device])
        self.on_host = is_processor(device)
        self.ledger = Ledger(int(device.global_mem_size), on_host=self.on_host)
        self.host_ledger = Ledger(total_memory(), on_host=True)
        self.most = int(device.max_mem_alloc_size)
        self.has_pinned = shares_memory(device, finely=True)


_places: dict[int, Place] = {}
_lock: Final = threading.RLock()


def find_place(driver: Driver, index: int) -> Place:
    """Return the device of that number, with the context that it has in this process (blocks).

    Raises:
        BackendUnavailable: It cannot be had.
        DeviceError: The driver fails.
    """
    device = find_device(driver.device, index)
    with _lock:
        known = _places.get(device.int_ptr)
        if known is None:
            known = _places[device.int_ptr] = Place(driver, device)
        return known
