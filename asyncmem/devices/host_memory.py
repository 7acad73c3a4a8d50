"""Memory of the host: mapped pages, how much there is, bytes at an address, and a device that another one works for."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeAlias

from asyncmem.devices.base import Device, MemoryInfo
from asyncmem.devices.cgroup import Container
from asyncmem.errors import InvalidRequest
from asyncmem.lazy import np

if TYPE_CHECKING:
    from typing import Self

    from numpy.typing import NDArray

    from asyncmem.devices.base import Fence, Stream

Bytes: TypeAlias = "NDArray[np.uint8]"

PAGE = mmap.PAGESIZE

_NO_RESERVE: Final = 0x4000 if sys.platform == "linux" else 0x40  # the system need not promise memory for all of it


class Pages:
    """Mapped memory, kept until it is given back by name and for no other reason.

    A mapping that is merely dropped stays mapped, also while the interpreter ends: the threads of a stream may still be
    writing there, and a leak is better than a crash.
    """

    def __init__(self, unit: int = PAGE, *, reserved: bool = False) -> None:
        """Begin with nothing mapped. Addresses are multiples of `unit`; what is `reserved` may never all be used."""
        self._spare = max(0, unit - PAGE)  # to align in
        self._unit = unit
        self._flags = _NO_RESERVE if reserved else 0
        self._mappings: dict[int, mmap.mmap] = {}

    def take(self, nbytes: int) -> int:
        """Map fresh zeroed memory and return its address.

        Raises:
            OSError: The system refuses; OverflowError when the size is beyond any system.
        """
        # Private, so that a forked child cannot write into the parent's buffers.
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | self._flags
        mapping = mmap.mmap(-1, nbytes + self._spare, flags=flags)
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(mapping))
        address = -(-int(np.frombuffer(mapping, np.uint8).ctypes.data) // self._unit) * self._unit
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


_container = Container()


def total_memory() -> int:
    """Return how many bytes of memory the machine has, or its container may have."""
    return min(os.sysconf("SC_PHYS_PAGES") * PAGE, _container.limit)


def host_memory() -> MemoryInfo:
    """Ask the system how many bytes could be used without swapping, and how many there are (reads files)."""
    total = total_memory()
    free = min(total, _container.left())
    with suppress(OSError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                free = min(free, int(line.split()[1]) * 1024)
    return MemoryInfo(free=free, total=total)


class _Range:
    def __init__(self, address: int, nbytes: int) -> None:
        self.__array_interface__ = {"data": (address, False), "shape": (nbytes,), "typestr": "|u1", "version": 3}


class Companion(Device):
    """Other memory that goes with a device. A kind of it says where its segments come from, and which peers it knows.

    A pool may be opened over it. Streams and fences are the owner's, and so is all work; it lives as long as the owner.

    Attributes:
        owner: The other device.
    """

    def __init__(self, owner: Device, name: str, capacity: int) -> None:
        """Serve a device."""
        self.owner = owner
        self.name = name
        self.capacity = capacity
        self.default_stream = owner.default_stream

    def __repr__(self) -> str:
        return f"<{type(self).__name__} beside {self.owner.name}>"

    @property
    def driver_calls(self) -> int:
        """How many calls of the driver the owner has made; they are counted together."""
        return self.owner.driver_calls

    def create_stream(self, name: str | None = None) -> Stream:
        """Make a stream of the owner's."""
        return self.owner.create_stream(name)

    def stream_of(self, source: object) -> Stream:
        """Return the owner's stream that `source` means."""
        return self.owner.stream_of(source)

    def record_all(self) -> Fence:
        """Return a fence behind everything submitted to every stream of the owner."""
        return self.owner.record_all()

    def begin_captures(self) -> None:
        """Pass it on to the owner."""
        self.owner.begin_captures()

    def end_captures(self) -> None:
        """Pass it on to the owner."""
        self.owner.end_captures()

    def fill(self, address: int, nbytes: int, value: int, stream: Stream) -> None:
        """Set bytes, by the owner."""
        self.owner.fill(address, nbytes, value, stream)

    def copy(self, target: int, source: int, nbytes: int, stream: Stream) -> None:
        """Copy by the owner, also from or to its own memory."""
        self.owner.copy(target, source, nbytes, stream)

    def copy_in(self, address: int, source: memoryview, stream: Stream) -> None:
        """Copy from host memory by the owner's `copy_in`."""
        self.owner.copy_in(address, source, stream)

    def copy_out(self, target: memoryview, address: int, stream: Stream) -> None:
        """Copy to host memory by the owner's `copy_out`."""
        self.owner.copy_out(target, address, stream)

    def copy_holds_up(self, host: memoryview, *, into: bool = False) -> bool:
        """Return whether a copy from (`into`) or to this memory blocks."""
        return self.owner.copy_holds_up(host, into=into)

    def peer_copy(self, target: int, source: int, nbytes: int, source_device: Device, stream: Stream) -> None:
        """Copy from the owner's memory, or a peer's, to here."""
        self.owner.peer_copy(target, source, nbytes, source_device, stream)

    def close(self) -> None:
        """Do nothing: the owner closes."""


class HostMemory(Companion):
    """What all kinds of the host's memory do alike."""

    granularity = PAGE
    host_readable = True

    def __init__(self, owner: Device, index: int) -> None:
        """Serve a device, which is the so many-th of its kind."""
        super().__init__(owner, f"{self.kind}:{index}", total_memory())

    def memory(self) -> MemoryInfo:
        """Ask the system how much host memory there is (blocks)."""
        return host_memory()

    def pinned(self) -> Self:
        """Return this very device."""
        return self
