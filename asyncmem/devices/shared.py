"""What devices with memory that other processes can open have in common."""

from __future__ import annotations

import bisect
import threading
from typing import NamedTuple, Protocol, runtime_checkable


class Place(NamedTuple):
    """Where memory is, for other processes.

    Attributes:
        group: What the file descriptor stands for.
        fd: The descriptor, which each process is sent once for a group.
        region: What the memory is a part of; another process opens it once.
        kept: What stays until all processes that have the region say that they have closed it.
        offset: Bytes before the memory in the region.
        facts: What else another process needs to open the region.
    """

    group: object
    fd: int
    region: object
    kept: object
    offset: int
    facts: dict[str, str | int]


@runtime_checkable
class Shareable(Protocol):
    """A device whose memory other processes can open."""

    kind: str

    def place(self, address: int) -> Place:
        """Return where the memory at an address is; 0 is the address of what is empty."""
        ...


class Region(Protocol):
    """A part of another process's memory that is open here."""

    @property
    def address(self) -> int:
        """The first byte, in this process."""
        ...

    @property
    def nbytes(self) -> int:
        """How many there are."""
        ...


class Ranges:
    """The free parts of a range of addresses; from any thread.

    Attributes:
        taken: Bytes in use, by address.
    """

    def __init__(self, address: int, nbytes: int) -> None:
        self.taken: dict[int, int] = {}
        self._free = [(address, nbytes)]  # by address; neighbours are joined
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
        """Have bytes be free again that are taken no more."""
        with self._lock:
            bisect.insort(self._free, (address, nbytes))
            joined: list[tuple[int, int]] = []
            for start, size in self._free:
                if joined and sum(joined[-1]) == start:
                    start, size = joined[-1][0], joined.pop()[1] + size  # noqa: PLW2901  # the two are one
                joined.append((start, size))
            self._free = joined
