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
            bisect.insort(self._free, (address, nbytes))
            joined: list[tuple[int, int]] = []
            for start, size in self._free:
                if joined and sum(joined[-1]) == start:
                    start, size = joined[-1][0], joined.pop()[1] + size  # noqa: PLW2901  # the two are one
                joined.append((start, size))
            self._free = joined
