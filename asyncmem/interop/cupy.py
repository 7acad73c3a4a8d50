"""CuPy's memory from a pool, a budget or a lease.

    async with pool.lease("1 GiB") as lease:  # awaited, by priority and deadline
        with asyncmem.interop.cupy.use(lease):
            y = cupy.fft.fft(x)  # allocates inside of the lease, without waiting

Each array has a buffer of its own, which goes back as the array dies, in the order of the stream that was current when
it was made. So CuPy's own rule holds: let that stream wait for others that use the array, before it dies.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from importlib import import_module
from typing import Any

from asyncmem.core import PointerAllocator
from asyncmem.interop.routing import device_of, need_no_blocking, needs, until_suspended
from asyncmem.pool.share import Share

with needs("cupy-cuda13x>=14"):
    import cupy

__all__ = ["use"]

_cuda: Any = cupy.cuda
_backend: Any = import_module("cupy_backends.cuda.stream")
_stream_here: object = _backend.__pyx_capi__["get_current_stream_ptr"]


def use(share: Share, *, tag: str = "cupy", timeout: float | str | None = None) -> AbstractContextManager[None]:
    """Have CuPy allocate all memory of this thread on the share's device from there, until the block ends.

    An array that outlives the block stays valid, and its memory goes back when it dies. `asyncmem.interop` says more.
    """
    device = device_of(share)
    need_no_blocking(share)
    elsewhere = _cuda.get_allocator()
    serve = PointerAllocator(
        share, device, _stream_here, _stream_of, _cuda.UnownedMemory, _cuda.MemoryPointer, tag=tag, timeout=timeout
    ).allocate
    alone = _cuda.runtime.getDeviceCount() == 1

    def serve_of_many(nbytes: int) -> object:
        return serve(nbytes) if _cuda.runtime.getDevice() == device else elsewhere(nbytes)

    inside = _cuda.using_allocator(serve if alone else serve_of_many)
    return until_suspended(share, inside.__enter__, lambda: inside.__exit__(None, None, None))


def _stream_of(handle: int) -> object:
    """Return what tells a pool the stream of this thread: CuPy's object, where it keeps the stream."""
    stream = _cuda.get_current_stream()
    return stream if isinstance(stream, _cuda.Stream) else handle
