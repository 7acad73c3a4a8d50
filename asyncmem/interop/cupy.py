"""CuPy's memory from a pool, a budget or a lease.

    async with pool.lease("1 GiB") as lease:  # awaited, by priority and deadline
        with asyncmem.interop.cupy.use(lease):
            y = cupy.fft.fft(x)  # allocates inside of the lease, without waiting

Each array has a buffer of its own, which goes back as the array dies, in the order of the stream that was current when
it was made. So CuPy's own rule holds: let that stream wait for others that use the array, before it dies.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from asyncmem.interop.routing import allocate, device_of, need_no_blocking, needs, until_suspended
from asyncmem.pool.share import Share

with needs("cupy-cuda13x>=14"):
    import cupy

__all__ = ["use"]


def use(share: Share, *, tag: str = "cupy", timeout: float | None = None) -> AbstractContextManager[None]:
    """Have CuPy allocate all memory of this thread on the share's device from there, until the block ends.

    An array that outlives the block stays valid, and its memory goes back when it dies. `asyncmem.interop` says more.
    """
    device = device_of(share)
    need_no_blocking(share)
    cuda: Any = cupy.cuda
    elsewhere = cuda.get_allocator()

    def serve(nbytes: int) -> object:
        if cuda.runtime.getDevice() != device:
            return elsewhere(nbytes)
        stream = cuda.get_current_stream()
        keeps = isinstance(stream, cuda.Stream)  # the handle, for as long as the pool keeps the object
        buffer = allocate(share, nbytes, stream if keeps else stream.ptr, tag, timeout)
        return cuda.MemoryPointer(cuda.UnownedMemory(buffer.address, nbytes, buffer, device), 0)

    inside = cuda.using_allocator(serve)
    return until_suspended(share, inside.__enter__, lambda: inside.__exit__(None, None, None))
