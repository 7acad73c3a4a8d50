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

import cupy

from asyncmem.interop.routing import allocate, device_of, need_no_blocking, until_suspended
from asyncmem.pool.share import Share

__all__ = ["use"]


def use(share: Share, *, tag: str = "cupy", timeout: float | None = None) -> AbstractContextManager[None]:
    """Have CuPy allocate all memory of this thread on the share's device from there, until the block ends.

    An array that outlives the block stays valid, and its memory goes back when it dies.

    Args:
        share: A lease or a part of one serves without waiting. A pool or a budget grows, or waits, on this thread.
        tag: A name under which statistics and errors count it.
        timeout: Seconds to wait for memory of a pool or a budget at most; None does not wait.

    Raises:
        InvalidRequest: No pool of CUDA memory; or, on an event loop's thread, no lease, or a block that awaits inside.
        OutOfMemoryError: Inside of the block; a `MemoryError`, as CuPy's own is.
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
