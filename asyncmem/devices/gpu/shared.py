"""Memory of a CUDA GPU that other processes can open, by cuda.core's pools for that.

Such a pool gives nothing back to the driver before it ends, and a process that has opened memory of it must close that
before the owner frees it. So a chunk stays until the device closes and all that opened it have closed it; segments are
its parts.
"""

from __future__ import annotations

import threading
import weakref
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from asyncmem.devices.base import MemoryInfo, Segment, whole_segment
from asyncmem.devices.host_memory import Companion
from asyncmem.devices.ranges import Ranges
from asyncmem.devices.shared import Place, Shareable
from asyncmem.errors import BackendUnavailable, InvalidRequest, OutOfMemoryError
from asyncmem.facts import OutOfMemoryFacts

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from asyncmem.devices.base import Device, Stream
    from asyncmem.devices.cuda import Cuda
    from asyncmem.devices.gpu.driver import Driver

_MOST: Final = 4 << 30
"""Bytes of the largest chunk: the driver crashes a process that opens one of 6 GiB (seen with 580.159)."""

_PAYLOAD: Final = 64
_FILE_DESCRIPTORS: Final = 1  # CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR


def _core() -> Any:  # noqa: ANN401  # it has no types
    try:
        import cuda.core
        from cuda.core._memory._ipc import IPCBufferDescriptor  # noqa: F401  # see `OpenChunk`
    except ImportError as error:
        tried = (f"cuda.core: {error}",)
        raise BackendUnavailable("shared CUDA memory", tried=tried, install="pip install 'cuda-core>=1.2,<2'") from None
    return cuda.core


def driver_shares(driver: Driver, index: int) -> bool:
    """Return whether the memory of a GPU can be opened by other processes (blocks: it imports cuda.core)."""
    try:
        _core()
    except BackendUnavailable:
        return False
    return bool(driver.attribute("MEMPOOL_SUPPORTED_HANDLE_TYPES", index) & _FILE_DESCRIPTORS)


class Held:
    """A buffer of cuda.core's, which goes back to its pool when this is dropped, behind a stream that lives as long."""

    def __init__(self, memory: Any, stream: Stream, owner: Cuda) -> None:  # noqa: ANN401  # it has no types
        self.memory = memory
        # No `__del__`: the collector would have destroyed the stream by then, and the driver follows its handle.
        weakref.finalize(self, _give_back, memory, stream, owner).atexit = False


def _give_back(memory: Any, stream: Stream, owner: Cuda) -> None:  # noqa: ANN401  # it has no types
    del stream  # the finalizer has kept it until now
    if not owner.driver.gone():
        with owner.context.entered():
            memory.close()


class PoolForOthers:
    """A pool of cuda.core's whose memory other processes can open, by a file descriptor."""

    def __init__(self, owner: Cuda) -> None:
        """Make it (blocks).

        Raises:
            BackendUnavailable: cuda.core is not there, or the driver has no such pools.
        """
        core = _core()
        self.stream = owner.create_stream("shared")
        try:
            with owner.context.entered():
                self.resource = core.DeviceMemoryResource(
                    owner.index, core.DeviceMemoryResourceOptions(ipc_enabled=True)
                )
                self.fd = int(self.resource.allocation_handle)
                self.order = core.Stream.from_handle(self.stream.handle)
        except Exception as error:  # of cuda.core's own types
            raise BackendUnavailable("shared CUDA memory", tried=(f"cuda.core: {error}",)) from error


class Chunk:
    """A piece of a pool for other processes.

    Attributes:
        pool: The pool.
        held: Its memory.
        address: Where it begins.
        nbytes: Its bytes.
        ranges: The parts of it.
        facts: What another process needs to open it.
    """

    def __init__(self, pool: PoolForOthers, held: Held) -> None:
        self.pool, self.held = pool, held
        self.address, self.nbytes = int(held.memory.handle), int(held.memory.size)
        self.ranges = Ranges((self.address, self.nbytes))
        payload, size = held.memory.ipc_descriptor.__reduce__()[1]
        self.facts: dict[str, str | int] = {"payload": payload.hex(), "size": size}


class SharedCuda(Shareable, Companion):
    """Memory of a GPU that other processes can open, by `asyncmem.share`. Get it by `Cuda.shareable()`.

    It never gives memory back to the driver before it ends, and has no piece above 4 GiB.
    """

    kind = "cuda"
    segment_kinds = ("shared", "direct")
    host_readable = False
    owner: Cuda

    def __init__(self, owner: Cuda) -> None:
        """Use the GPU's `shareable` instead.

        Raises:
            BackendUnavailable: cuda.core is not there, or the driver has no such pools.
        """
        super().__init__(owner, f"cuda_shared:{owner.index}", owner.capacity)
        self.granularity = owner.granularity
        self.dlpack_device = owner.dlpack_device
        self.fence_calls = owner.fence_calls
        self._pool: PoolForOthers | None = PoolForOthers(owner)
        self._chunks: list[Chunk] = []
        self._reserved = 0
        self._lock = threading.RLock()

    def suggest_capacity(self, nbytes: int) -> None:
        """Reserve no more than the pool's limit."""
        self.capacity = min(nbytes, self.owner.capacity)

    def memory(self) -> MemoryInfo:
        """Return what is still free (blocks): what is reserved and not used, and what the driver has."""
        used = sum(sum(one.ranges.taken.values()) for one in self._chunks)
        free = self._reserved - used + min(self.owner.memory().free, self.capacity - self._reserved)
        return MemoryInfo(free=max(0, free), total=self.capacity)

    def allocate_segment(self, nbytes: int, kind: str = "auto", stream: Stream | None = None) -> Segment:  # noqa: ARG002  # it is there for all streams at once
        """Take a part of a chunk, or get another chunk (blocks); usable by every stream at once.

        Raises:
            OutOfMemoryError: There is too little, or too little in one piece.
        """
        nbytes, kind = whole_segment(nbytes, kind, self.segment_kinds, self.granularity)
        with self._lock:
            for chunk in self._chunks:
                address = chunk.ranges.take(nbytes)
                if address is not None:
                    return Segment(address, nbytes, kind, chunk)
            chunk = self._get(nbytes)
            address = chunk.ranges.take(nbytes)
            assert address is not None
            return Segment(address, nbytes, kind, chunk)

    def free_segment(self, segment: Segment) -> None:
        """Give the part of the chunk back, for another segment."""
        chunk = segment.token
        if not isinstance(chunk, Chunk) or chunk.ranges.taken.pop(segment.address, None) is None:
            raise InvalidRequest("segment", segment, f"a segment of {self.name!r} that is not given back yet")
        chunk.ranges.give_back(segment.address, segment.nbytes)

    def grant_access(self, peers: Sequence[Device]) -> None:
        """Let other GPUs use it.

        Raises:
            InvalidRequest: One of them is no GPU of CUDA's.
        """
        assert self._pool is not None
        with self.owner.context.entered():
            self._pool.resource.peer_accessible_by = [one.index for one in self.owner.gpu_peers(peers)]

    def place(self, address: int) -> Place:
        """Return where the memory at an address is in its chunk."""
        for one in self._chunks:
            if not address:  # of what is empty
                address = one.address
            if one.address <= address < one.address + one.nbytes:
                facts = {**one.facts, "gpu": self.owner.identity}
                return Place(one.pool, one.pool.fd, one, one.held, address - one.address, facts)
        raise InvalidRequest("address", hex(address), f"memory of {self.name!r}")

    def close(self) -> None:
        """Release the pool, unless a segment is left: it ends once those who opened memory of it have closed that."""
        with self._lock:
            if not any(one.ranges.taken for one in self._chunks):
                self._chunks.clear()
                self.capacity = self._reserved = 0
                self._pool = None

    def _get(self, nbytes: int) -> Chunk:
        spare = min(self.capacity - self._reserved, _MOST)
        if nbytes > spare:
            advice = (
                ("memory that other processes can open comes in pieces of at most 4 GiB",) if nbytes > _MOST else ()
            )
            facts = OutOfMemoryFacts(asked=nbytes, device=self.name, device_free=max(0, spare), advice=advice)
            raise OutOfMemoryError(facts)
        pool = self._pool
        assert pool is not None
        try:
            with self.owner.context.entered():
                chunk = Chunk(pool, Held(pool.resource.allocate(nbytes, stream=pool.order), pool.stream, self.owner))
        except Exception as error:  # of cuda.core's own types
            raise OutOfMemoryError(OutOfMemoryFacts(asked=nbytes, device=self.name, cause=str(error))) from error
        pool.stream.synchronize_blocking()
        self._chunks.append(chunk)
        self._reserved += nbytes
        return chunk


class OpenChunk:
    """A chunk of another process's, open in this one until this is dropped.

    Attributes:
        address: Where it begins here.
        nbytes: Its bytes.
    """

    def __init__(
        self, group: PoolOfAnother, facts: dict[str, Any], dropped: Callable[[Callable[[], None]], None]
    ) -> None:
        """Open it (blocks). Once this is dropped, `dropped` is called with what closes it, which blocks.

        Raises:
            OSError: The driver refuses.
            ValueError: The facts cannot be right.
        """
        from cuda.core._memory._ipc import IPCBufferDescriptor

        self.nbytes, payload = int(facts["size"]), bytes.fromhex(facts["payload"])
        if len(payload) != _PAYLOAD or not 0 < self.nbytes <= _MOST:
            raise ValueError("the driver knows no such memory")
        try:
            with group.owner.context.entered():
                # Private: the public way (of cuda.core 1.2) is to unpickle, which nothing from another process is.
                descriptor = IPCBufferDescriptor._init(payload, self.nbytes)
                memory = _core().Buffer.from_ipc_descriptor(group.resource, descriptor, stream=group.order)
        except Exception as error:  # of cuda.core's own types
            raise OSError(str(error)) from error
        self.address = int(memory.handle)
        weakref.finalize(self, dropped, partial(group.close, memory)).atexit = False


class PoolOfAnother:
    """A pool of another process's, in which chunks are opened here, open until this and they are dropped."""

    def __init__(self, owner: Cuda, fd: int, dropped: Callable[[Callable[[], None]], None]) -> None:
        """Open it (blocks); the descriptor stays the caller's. `dropped` is as for `OpenChunk`.

        Raises:
            OSError: The driver refuses.
        """
        self.owner = owner
        core = _core()
        self.stream = owner.create_stream("shared")
        try:
            with owner.context.entered():
                self.resource = core.DeviceMemoryResource.from_allocation_handle(owner.index, fd)
                self.order = core.Stream.from_handle(self.stream.handle)
        except Exception as error:  # of cuda.core's own types
            raise OSError(str(error)) from error
        self._open_to_peers()
        weakref.finalize(self, dropped, self.resource.close).atexit = False

    def _open_to_peers(self) -> None:
        """Let the other GPUs of this process use it: here it is its own GPU's alone, whatever its owner has granted."""
        driver, own = self.owner.driver, self.owner.context.device
        others = [one for one in range(int(driver.call("cuDeviceGetCount"))) if one != self.owner.index]
        peers = [one for one in others if driver.call("cuDeviceCanAccessPeer", driver.call("cuDeviceGet", one), own)]
        if peers:
            with self.owner.context.entered(), suppress(Exception):  # without it copies go by the host
                self.resource.peer_accessible_by = peers

    def close(self, memory: Any) -> None:  # noqa: ANN401  # it has no types
        """Close a chunk (blocks), which nothing uses any more."""
        with self.owner.context.entered():
            memory.close()
        self.stream.synchronize_blocking()
