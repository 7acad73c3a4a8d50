"""RMM both ways: its users, such as cuDF, take memory from a share; and a pool lies on top of a resource of its.

    rmm.mr.set_current_device_resource(asyncmem.interop.rmm.memory_resource(pool, timeout=10))

    pool = asyncmem.AsyncMemoryPool(asyncmem.interop.rmm.ResourceDevice(rmm.mr.CudaAsyncMemoryResource()))

RMM calls Python for each allocation and free, a few microseconds. It frees from any thread. RMM 26.06 or later.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Final

from asyncmem.core import AddressedBuffers
from asyncmem.devices import Cuda
from asyncmem.devices.gpu.segments import Source
from asyncmem.errors import InvalidRequest, OutOfMemoryError
from asyncmem.facts import OutOfMemoryFacts
from asyncmem.interop.routing import device_of, needs

with needs("rmm-cu13>=26.6"):
    from rmm.mr import CallbackMemoryResource, DeviceMemoryResource
    from rmm.pylibrmm.stream import Stream

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asyncmem.devices.base import Segment
    from asyncmem.pool.share import Share

__all__ = ["ResourceDevice", "memory_resource"]

_ORDERED: Final = "stream_ordered"


def memory_resource(share: Share, *, tag: str = "rmm", timeout: float | str | None = None) -> CallbackMemoryResource:
    """Return a resource of RMM's that allocates from a pool, a budget or a lease.

    Memory is ready in the order of the stream that it is asked for, and goes back behind the one that it is freed on. A
    full share raises `MemoryError`, with all facts in its text.

    Args:
        share: A pool or a budget grows, or waits, on the thread that allocates, so on an event loop's use a lease.
        tag: A name under which statistics and errors count it.
        timeout: Seconds to block that thread for at most; None does not wait.

    Raises:
        InvalidRequest: It is no memory of a CUDA device.
    """
    return CallbackMemoryResource(*_Calls(share, tag, timeout).calls)


class _Calls:
    """What RMM calls. It keeps only pointers, which its resources in C++ use when its own object in Python is gone."""

    _used: ClassVar[dict[int, _Calls]] = {}  # by the addresses of what is live

    def __init__(self, share: Share, tag: str, timeout: float | str | None) -> None:
        device_of(share)
        stream_of = share._opened.device.stream_of
        # RMM's object of a stream keeps nothing alive.
        self._buffers = AddressedBuffers(share, lambda *named: stream_of(named[-1]), tag=tag, timeout=timeout)
        self.calls = (self.allocate, self.free)

    def allocate(self, nbytes: int, stream: Stream) -> int:
        address = self._buffers.allocate(nbytes, stream)
        if nbytes:
            self._used[address] = self
        return address

    def free(self, address: int, nbytes: int, stream: Stream) -> None:
        self._used.pop(address, None)
        self._buffers.free(address, nbytes, stream)


class ResourceDevice(Cuda):
    """A GPU whose segments come from a resource of RMM's: what a pool over it reserves, RMM counts and limits.

    It has neither access to other GPUs nor paged memory. The resource must stay usable until the pool is closed.
    """

    joins_segments = False  # RMM does not say what becomes of memory that is given back

    def __init__(self, resource: DeviceMemoryResource, index: int = 0) -> None:
        """Take a resource of the device with this index.

        Raises:
            InvalidRequest: It is no resource of RMM's.
        """
        if not isinstance(resource, DeviceMemoryResource):
            raise InvalidRequest("resource", resource, "a memory resource of RMM's")
        self._resource = resource
        super().__init__(index, segments=_ORDERED)

    def _set_up(self, segments: str) -> None:
        super()._set_up(segments)
        self.segment_kinds = (_ORDERED,)
        self.page, self._paged = 0, None

    def _make_source(self, kind: str) -> Source:
        del kind
        return _ResourceSegments(self._resource, self.name)


class _ResourceSegments(Source):
    def __init__(self, resource: DeviceMemoryResource, device: str) -> None:
        self._resource, self._device = resource, device

    def take(self, nbytes: int, stream: int) -> tuple[int, None]:
        try:
            return int(self._resource.allocate(nbytes, _stream_of(stream))), None
        except MemoryError as error:
            raise OutOfMemoryError(OutOfMemoryFacts(asked=nbytes, device=self._device)) from error

    def give_back(self, segment: Segment) -> None:
        self._resource.deallocate(segment.address, segment.nbytes, _stream_of(0))

    def grant(self, peers: Sequence[int]) -> None:
        raise InvalidRequest("peers", peers, "none: memory of a resource of RMM's is its own GPU's")


def _stream_of(handle: int) -> Stream:
    return Stream(_Handle(handle))


class _Handle:
    def __init__(self, handle: int) -> None:
        self._handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._handle
