"""Numba's device memory from pools, budgets and leases: a memory manager of its, named before it makes its context.

    NUMBA_CUDA_MEMORY_MANAGER=asyncmem.interop.numba python program.py

    async with pool.lease("1 GiB") as lease:  # awaited, by priority and deadline
        with asyncmem.interop.numba.use(lease):
            kernel[blocks, threads](numba.cuda.to_device(x))  # allocates inside of the lease, without waiting

Outside of such blocks memory comes from the process's own pool for the device, `asyncmem.device("cuda:0").pool`.
"""

from __future__ import annotations

import threading
import weakref
from contextlib import AbstractContextManager

from asyncmem.core import need_device_memory
from asyncmem.errors import BackendUnavailable
from asyncmem.interop.routing import device_of, need_no_blocking, needs, until_suspended
from asyncmem.pool.share import Share
from asyncmem.runtime import device as device_here

with needs("numba-cuda[cu13]"):
    from cuda.bindings.driver import CUdeviceptr
    from numba import cuda

__all__ = ["ShareMemoryManager", "use"]

_TAG = "numba"


class _Thread(threading.local):
    def __init__(self) -> None:
        self.places: list[tuple[int, Share, str, float | str | None]] = []


_thread = _Thread()
_beginning = threading.Lock()  # Numba makes its list of devices at the first use, and fails where two threads do so


def use(share: Share, *, tag: str = _TAG, timeout: float | str | None = None) -> AbstractContextManager[None]:
    """Have Numba allocate all memory of this thread on the share's device from there, until the block ends.

    An array that outlives the block stays valid, and its memory goes back when it dies. `asyncmem.interop` says more.
    """
    device = device_of(share)
    need_no_blocking(share)
    with _beginning:
        manager = cuda.gpus[device].get_primary_context().memory_manager
    if not isinstance(manager, ShareMemoryManager):
        install = "Set NUMBA_CUDA_MEMORY_MANAGER=asyncmem.interop.numba, before Numba uses the GPU."
        raise BackendUnavailable("numba", tried=[f"its memory manager {type(manager).__name__}"], install=install)
    place = (device, share, tag, timeout)
    return until_suspended(share, lambda: _thread.places.append(place), lambda: _thread.places.remove(place))


class ShareMemoryManager(cuda.HostOnlyCUDAMemoryManager):  # type: ignore[misc]  # Numba has no types
    """What `numba.cuda.set_memory_manager` takes. Host memory stays Numba's.

    Numba names no streams. Memory is ready for the legacy default stream, which all that Numba makes wait for, and
    goes back behind the work of every stream.
    """

    def initialize(self) -> None:
        """Nothing is to be made ready."""

    def memalloc(self, size: int) -> cuda.MemoryPointer:
        """Allocate for any stream that waits for the legacy default one."""
        device = self.context.device.id
        for place in reversed(_thread.places):
            if place[0] == device:
                _, share, tag, timeout = place
                break
        else:
            share, tag, timeout = device_here(f"cuda:{device}").pool, _TAG, None
        buffer = share.allocate(size, tag=tag, timeout=timeout)
        need_device_memory(share, buffer)
        buffer._lend(None)
        return cuda.MemoryPointer(weakref.proxy(self.context), CUdeviceptr(buffer.address), size, finalizer=buffer.free)

    def get_memory_info(self) -> cuda.MemoryInfo:
        """Return the device's free and total bytes."""
        found = device_here(f"cuda:{self.context.device.id}").pool.device.memory()
        return cuda.MemoryInfo(free=found.free, total=found.total)

    def get_ipc_handle(self, memory: object) -> object:
        """Raise: other processes cannot open a pool's memory."""
        raise NotImplementedError("memory of asyncmem cannot be opened by another process")

    @property
    def interface_version(self) -> int:
        """1."""
        return 1


_numba_memory_manager = ShareMemoryManager
