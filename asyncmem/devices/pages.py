"""Real host memory: pages from the operating system, how much it has, and bytes at an address."""

import ctypes
import mmap
import os
import sys
from pathlib import Path

import numpy as np
import numpy.typing as npt

from asyncmem.devices.base import MemoryInfo
from asyncmem.errors import InvalidRequest

Bytes = npt.NDArray[np.uint8]

PAGE = mmap.PAGESIZE


class Pages:
    """Mapped memory, kept until it is given back by name and for no other reason.

    A mapping that is merely dropped stays mapped, also while the interpreter ends: the threads of a stream may still be
    writing there, and a leak is better than a crash.
    """

    def __init__(self) -> None:
        """Begin with nothing mapped."""
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
            mapping = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
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
