"""Real host memory: pages from the operating system, how much it has, and bytes at an address."""

import ctypes
import mmap
import os
import sys
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from asyncmem.devices.base import MemoryInfo
from asyncmem.errors import InvalidRequest

Bytes = npt.NDArray[np.uint8]

PAGE = mmap.PAGESIZE

_NO_RESERVE: Final = 0x4000 if sys.platform == "linux" else 0x40  # the system need not promise memory for all of it


class Pages:
    """Mapped memory, kept until it is given back by name and for no other reason.

    A mapping that is merely dropped stays mapped, also while the interpreter ends: the threads of a stream may still be
    writing there, and a leak is better than a crash.
    """

    def __init__(self, flags: int = 0) -> None:
        """Begin with nothing mapped; `flags` are the system's, beside those that are always there."""
        self._flags = flags
        self._mappings: dict[int, mmap.mmap] = {}

    def take(self, nbytes: int) -> int:
        """Map fresh zeroed memory and return its address, which is a page's.

        Raises:
            OSError: The system refuses; OverflowError when the size is beyond any system.
        """
        if sys.platform == "win32":
            mapping = mmap.mmap(-1, nbytes)
        else:
            # Private, so that a forked child cannot write into the parent's buffers.
            mapping = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | self._flags)
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(mapping))
        address = int(np.frombuffer(mapping, np.uint8).ctypes.data)
        self._mappings[address] = mapping
        return address

    def give_back(self, address: int) -> None:
        """Unmap what was mapped at `address`.

        Raises:
            InvalidRequest: Nothing is.
        """
        mapping = self._mappings.pop(address, None)
        if mapping is None:
            raise InvalidRequest("segment", hex(address), "a segment that is not given back yet")
        mapping.close()
        ctypes.pythonapi.Py_DecRef(ctypes.py_object(mapping))


class ReservedPages:
    """Ranges of addresses far larger than the memory that will be used in them, which comes with the first use."""

    def __init__(self, unit: int) -> None:
        """Begin with none; ranges begin at multiples of `unit`."""
        self._unit = unit
        self._pages = Pages(_NO_RESERVE)
        self._starts: dict[int, int] = {}

    def take(self, nbytes: int) -> int:
        """Return the address of a new range; raises what `Pages.take` does."""
        start = self._pages.take(nbytes + self._unit)
        address = -(-start // self._unit) * self._unit
        self._starts[address] = start
        return address

    def give_back(self, address: int) -> None:
        """Take a range back."""
        self._pages.give_back(self._starts.pop(address))


def bytes_at(address: int, nbytes: int) -> Bytes:
    """Return a writable view of memory; it keeps nothing alive."""
    return np.asarray(_Range(address, nbytes))


def bytes_of(view: memoryview, *, writable: bool = False) -> Bytes:
    """Return the bytes behind a host object, without a copy.

    Raises:
        InvalidRequest: They are not contiguous, or must be written and may not be.
    """
    if not view.c_contiguous or (writable and view.readonly):
        expected = "contiguous writable memory" if writable else "contiguous memory"
        raise InvalidRequest("memoryview", view, expected)
    return np.frombuffer(view, np.uint8) if view.nbytes else np.empty(0, np.uint8)


def total_memory() -> int:
    """Return how many bytes of memory the machine has."""
    if sys.platform == "win32":
        return 1 << 40  # mmap itself refuses there what cannot be committed
    return os.sysconf("SC_PHYS_PAGES") * PAGE


def host_memory() -> MemoryInfo:
    """Ask the system how many bytes could be used without swapping, and how many there are (reads files)."""
    total = total_memory()
    return MemoryInfo(free=min(total, _available(default=total)), total=total)


def _available(default: int) -> int:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return default
    for line in lines:
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return default


class _Range:
    def __init__(self, address: int, nbytes: int) -> None:
        self.__array_interface__ = {"data": (address, False), "shape": (nbytes,), "typestr": "|u1", "version": 3}
