"""One device of Metal as all of this process share it: its memory by addresses."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from asyncmem.devices.base import MemoryInfo, Segment
from asyncmem.devices.metal.api import SHARED
from asyncmem.devices.metal.driver import find_device
from asyncmem.devices.pages import PAGE, host_memory
from asyncmem.devices.segments import SegmentBook
from asyncmem.errors import InvalidRequest, OutOfMemoryError
from asyncmem.facts import OutOfMemoryFacts

if TYPE_CHECKING:
    from asyncmem.devices.metal.api import MTLBuffer, MTLDevice
    from asyncmem.devices.metal.driver import Driver

KINDS: Final = ("shared", "direct")


class Held(NamedTuple):
    """A buffer, which is freed once nothing refers to it, and where it begins."""

    buffer: MTLBuffer
    start: int


class Place:
    """A device and the buffers that were got of it, which outlive whoever asked for them."""

    def __init__(self, gpu: MTLDevice) -> None:
        """Have none. Get it by `find_place`."""
        self.gpu = gpu
        self.unified = bool(gpu.hasUnifiedMemory())
        self.total = int(gpu.recommendedMaxWorkingSetSize())
        self.most = int(gpu.maxBufferLength())
        self._book = SegmentBook(str(gpu.name()), KINDS)
        self._held: dict[int, Held] = {}
        self._lock = threading.RLock()

    def memory(self) -> MemoryInfo:
        """Answer what this process has not taken, and no more than the host has free (reads files)."""
        left = max(0, self.total - int(self.gpu.currentAllocatedSize()))
        return MemoryInfo(free=min(left, host_memory().free), total=self.total)

    def take(self, driver: Driver, nbytes: int, kind: str) -> Segment:
        """Get a buffer that begins with a page (blocks).

        Raises:
            OutOfMemoryError: There is too little, or no buffer is as large.
            DeviceError: Metal fails.
        """
        # Metal promises no alignment of what it gives.
        whole = nbytes + PAGE
        if whole > self.most:
            raise self._too_much(driver, nbytes, f"at most {self.most >> 20} MiB in one piece, by Metal's own bound")
        with self._lock, driver.pool():
            # It would give more than the device can use at a time, and whatever uses that fails.
            fits = whole <= self.memory().free
            buffer = driver.make_if_possible(self.gpu.newBufferWithLength_options_, whole, SHARED) if fits else None
            if buffer is None:
                raise self._too_much(driver, nbytes)
            start = int(np.frombuffer(buffer.contents().as_buffer(whole), np.uint8).ctypes.data)
            segment = Segment(-(-start // PAGE) * PAGE, nbytes, kind)
            self._held[segment.address] = Held(buffer, start)
            self._book.enlist(segment)
            return segment

    def give_back(self, driver: Driver, segment: Segment) -> None:
        """Let go of a buffer. Work that still uses it keeps it for so long."""
        driver.calls += 1
        with driver.pool():
            self._book.withdraw(segment)
            del self._held[segment.address]

    def find(self, address: int, nbytes: int) -> tuple[MTLBuffer, int]:
        """Return the buffer in which a range lies, and where in it.

        Raises:
            InvalidRequest: It lies in none, or not as a whole.
        """
        segment = self._book.find(address, nbytes)
        held = self._held.get(segment.address) if segment is not None else None
        if held is None:
            raise InvalidRequest("address", hex(address), f"{nbytes} bytes within one segment of the device")
        return held.buffer, address - held.start

    def _too_much(self, driver: Driver, nbytes: int, *advice: str) -> OutOfMemoryError:
        facts = OutOfMemoryFacts(asked=nbytes, device=driver.device, device_free=self.memory().free, advice=advice)
        return OutOfMemoryError(facts)


_places: dict[int, Place] = {}
_lock: Final = threading.RLock()


def find_place(driver: Driver, index: int) -> Place:
    """Return the device of that number, with what this process has of it (blocks).

    Raises:
        BackendUnavailable: It cannot be had.
    """
    gpu = find_device(driver.device, index)
    with _lock:
        return _places.setdefault(int(gpu.registryID()), Place(gpu))
