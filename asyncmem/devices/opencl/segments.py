"""Segments: shared virtual memory, which has addresses.

Sub-buffers would do without it, but two that overlap may not be used at the same time, and they begin where the device
likes it: a pool puts blocks anywhere, and works on the bytes of one while kernels work on the next.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from asyncmem.devices.base import Segment
from asyncmem.devices.pages import PAGE
from asyncmem.devices.segments import SegmentBook
from asyncmem.errors import OutOfMemoryError
from asyncmem.facts import OutOfMemoryFacts

if TYPE_CHECKING:
    import pyopencl as cl

    from asyncmem.devices.opencl.driver import Driver
    from asyncmem.devices.opencl.ledger import Ledger
    from asyncmem.devices.opencl.place import Place

# An allocation that is dropped is freed, and one whose device is forgotten may still be in use.
_out: Final[dict[int, cl.SVMAllocation]] = {}


class Segments:
    """Gets segments of one kind of memory, counted in a ledger, and gives them back."""

    def __init__(self, name: str, driver: Driver, place: Place, kinds: tuple[str, ...], *, fine: bool = False) -> None:
        """Serve the device of that name; `fine` segments may be read and written by the host at any time."""
        flags = driver.cl.svm_mem_flags
        self._book = SegmentBook(name, kinds)
        self._driver = driver
        self._place = place
        self._flags = int(flags.READ_WRITE | (flags.SVM_FINE_GRAIN_BUFFER if fine else 0))
        self._ledger: Ledger = place.host_ledger if fine else place.ledger

    def take(self, nbytes: int, kind: str) -> Segment:
        """Get whole pages (blocks)."""
        nbytes, kind = self._book.order(nbytes, kind)
        # The driver aligns to 128 bytes at most.
        whole = nbytes + PAGE
        if whole > self._place.most:
            raise self._beyond(nbytes)
        free = self._ledger.take(whole, self._book.device)
        try:
            allocation = self._driver.allocate(self._place.context, whole, self._flags, free)
        except BaseException:
            self._ledger.give_back(whole)
            raise
        address = -(-allocation.svm_ptr // PAGE) * PAGE
        segment = Segment(address, nbytes, kind, allocation)
        self._book.enlist(segment)
        _out[address] = allocation
        return segment

    def give_back(self, segment: Segment) -> None:
        """Free a segment (blocks); where the driver fails, it is still out."""
        self._book.withdraw(segment)
        allocation = _out.pop(segment.address)
        try:
            self._driver.call(allocation.release)
        except BaseException:
            self._book.enlist(segment)
            _out[segment.address] = allocation
            raise
        self._ledger.give_back(segment.nbytes + PAGE)

    def holds(self, address: int, nbytes: int) -> bool:
        """Tell whether a range lies in one of the segments that are out."""
        return self._book.find(address, nbytes) is not None

    def _beyond(self, nbytes: int) -> OutOfMemoryError:
        advice = f"at most {self._place.most >> 20} MiB in one piece, which is all that the driver gives out"
        free = self._ledger.free()
        return OutOfMemoryError(
            OutOfMemoryFacts(asked=nbytes, device=self._book.device, device_free=free, advice=(advice,))
        )
