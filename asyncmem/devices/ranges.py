"""Ranges of addresses that are taken and given back in parts."""

import bisect
import threading


class Ranges:
    """Free parts of ranges of addresses, taken first fit: low addresses stay dense. From any thread.

    Attributes:
        taken: Bytes in use, by address.
    """

    def __init__(self, *free: tuple[int, int]) -> None:
        """Begin with ranges, each its address and bytes."""
        self.taken: dict[int, int] = {}
        self._free = [*free]  # by address; neighbours are joined
        self._lock = threading.RLock()  # re-entrant: a finalizer may interrupt the holder on the same thread

    def take(self, nbytes: int) -> int | None:
        """Take the first bytes that are free together, and return their address; None where there are none."""
        with self._lock:
            for place, (address, free) in enumerate(self._free):
                if free >= nbytes:
                    self._free[place : place + 1] = [(address + nbytes, free - nbytes)] if free > nbytes else []
                    self.taken[address] = nbytes
                    return address
        return None

    def give_back(self, address: int, nbytes: int) -> None:
        """Free what was taken, or add a range."""
        with self._lock:
            self.taken.pop(address, None)
            at = bisect.bisect(self._free, (address, 0))
            if at < len(self._free) and address + nbytes == self._free[at][0]:
                nbytes += self._free.pop(at)[1]
            if at and sum(self._free[at - 1]) == address:
                address, before = self._free.pop(at - 1)
                nbytes += before
            bisect.insort(self._free, (address, nbytes))
