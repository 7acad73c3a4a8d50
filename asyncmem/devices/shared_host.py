"""Memory of the host that other processes can map: one file without a name, whose pieces are the segments.

The file is sealed against shrinking, is in no directory, and ends with the last process that has it.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import sys
import weakref
from typing import Final

from asyncmem.devices.host import Host
from asyncmem.devices.host_memory import PAGE, Pages
from asyncmem.devices.ranges import Ranges
from asyncmem.devices.shared import Place, Shareable
from asyncmem.errors import BackendUnavailable, InvalidRequest

_FAILED: Final = ctypes.c_void_p(-1).value


def _library() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_longlong)
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    return libc


def _error() -> OSError:
    return OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


class Mapping:
    """A shared file in this process's addresses, unmapped when it is dropped. A forked child has it not.

    Attributes:
        fd: The file; -1 once it is closed.
        address: Where it begins.
        nbytes: Its length.
        ranges: What of it this process uses as memory of its own.
    """

    def __init__(self, fd: int, nbytes: int, *, keep: bool = False) -> None:
        """Map a file, which it owns from then on, and close that file unless it is to be kept.

        Raises:
            OSError: The system refuses.
        """
        self.nbytes = nbytes
        self.fd = fd
        libc = _library()
        address = libc.mmap(None, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, fd, 0)
        if address == _FAILED:
            self._close()
            raise _error()
        self._libc = libc
        self.address: int = address
        self.ranges = Ranges((address, nbytes))
        weakref.finalize(self, _unmap, libc, os.getpid(), address, nbytes, self.ranges).atexit = False
        # A forked child could write into memory that is other processes' by then.
        self._advise(0, nbytes, mmap.MADV_DONTFORK)
        if keep:
            weakref.finalize(self, _close, os.getpid(), fd).atexit = False
            _kept.add(self)
        else:
            self._close()

    def empty(self, address: int, nbytes: int) -> None:
        """Give the memory behind whole pages back to the system; they read as zeros from then on, in all processes."""
        self._advise(address - self.address, nbytes, mmap.MADV_REMOVE)

    def _advise(self, offset: int, nbytes: int, advice: int) -> None:
        if self._libc.madvise(self.address + offset, nbytes, advice):
            raise _error()

    def _close(self) -> None:
        os.close(self.fd)
        self.fd = -1


_kept: weakref.WeakSet[Mapping] = weakref.WeakSet()


def _unmap(libc: ctypes.CDLL, pid: int, address: int, nbytes: int, ranges: Ranges) -> None:
    # What is merely dropped while a part is in use stays mapped: a leak is better than a crash.
    if pid == os.getpid() and not ranges.taken:
        libc.munmap(address, nbytes)


def _close(pid: int, fd: int) -> None:
    if pid == os.getpid():
        os.close(fd)


def _after_fork() -> None:
    for one in tuple(_kept):
        one._close()
    _kept.clear()


if sys.platform == "linux":
    os.register_at_fork(after_in_child=_after_fork)


def open_mapping(fd: int) -> Mapping:
    """Map a file that another process has made, which is closed then.

    Raises:
        OSError: It could shrink under its readers, or cannot be mapped.
    """
    try:
        sealed = fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
        nbytes = os.fstat(fd).st_size
    except BaseException:
        os.close(fd)
        raise
    if not sealed:
        os.close(fd)
        raise OSError("the file is not sealed against shrinking")
    return Mapping(fd, nbytes)


class SharedPages(Pages):
    """Pages of one file that is as long as the machine has memory, and has memory only where it is used.

    Attributes:
        mapping: The file in this process; None once it is let go of.
    """

    mapping: Mapping | None

    def __init__(self, nbytes: int) -> None:
        """Make the file.

        Raises:
            OSError: The system refuses.
        """
        fd = os.memfd_create("asyncmem", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, nbytes)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        except BaseException:
            os.close(fd)
            raise
        self.mapping = Mapping(fd, nbytes, keep=True)
        self._ranges = self.mapping.ranges

    def take(self, nbytes: int) -> int:
        """Take zeroed pages, the first that are free, and return their address.

        Raises:
            OSError: There are no so many together, or the file is gone.
        """
        address = None if self.mapping is None else self._ranges.take(nbytes)
        if address is None:
            raise OSError(f"no {nbytes} bytes together are free")
        return address

    def give_back(self, address: int) -> None:
        """Give pages back.

        Raises:
            InvalidRequest: None were taken there.
        """
        nbytes = self._ranges.taken.pop(address, None)
        if nbytes is None:
            raise InvalidRequest("segment", hex(address), "a segment that is not given back yet")
        assert self.mapping is not None
        self.mapping.empty(address, nbytes)
        self._ranges.give_back(address, nbytes)

    def let_go(self) -> None:
        """Close the file, unless some of it is taken."""
        if not self._ranges.taken:
            self.mapping = None


class SharedHost(Shareable, Host):
    """Memory of this machine that other processes can open, by `asyncmem.share`. Get it by `Host.shareable()`.

    Linux only. A process that was forked while it exists does not have its memory.
    """

    _pages: SharedPages

    def __init__(self) -> None:
        """Make the file.

        Raises:
            BackendUnavailable: The system has no such files.
        """
        super().__init__()
        try:
            self._pages = SharedPages(self.capacity // PAGE * PAGE)
        except (AttributeError, OSError) as error:
            raise BackendUnavailable("host", tried=(f"shared memory: {error}",), install="It needs Linux") from None

    def close(self) -> None:
        """End the threads, and close the file, as its readers then do, too; segments that are left keep it."""
        super().close()
        self._pages.let_go()

    def place(self, address: int) -> Place:
        """Return where the memory at an address is in the file; 0 is the address of what is empty."""
        one = self._pages.mapping
        assert one is not None  # a buffer is there
        return Place(
            group=one, fd=one.fd, region=one, kept=None, offset=address - one.address if address else 0, facts={}
        )
