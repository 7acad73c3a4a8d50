"""Whose memory an address is: some protocols give away no more of it."""

from __future__ import annotations

import contextlib
from typing import Final

from asyncmem.devices.cuda.device import Cuda
from asyncmem.devices.cuda.driver import Driver, start
from asyncmem.errors import DeviceError

_INVALID_CONTEXT: Final = 201


def device_index(address: int) -> int:
    """Return the index of the GPU that has the memory at `address`.

    Raises:
        BackendUnavailable: CUDA cannot be used here.
        DeviceError: The driver knows of no such memory.
    """
    start("cuda")
    driver = Driver("cuda")
    try:
        return _asked(driver, address)
    except DeviceError as error:
        if error.code != _INVALID_CONTEXT:
            raise
    # Nothing of CUDA is current on this thread; any GPU's context will do.
    with contextlib.closing(Cuda(0)) as any_device, any_device.context.entered():
        return _asked(driver, address)


def _asked(driver: Driver, address: int) -> int:
    kind = driver.enumerator("CUpointer_attribute", "DEVICE_ORDINAL")
    return int(driver.call("cuPointerGetAttribute", kind, address))
