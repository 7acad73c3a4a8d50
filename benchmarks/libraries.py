"""The allocators of CuPy, RMM and `cuda.core`, by the cheapest calls that each has in Python."""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any, ClassVar

from benchmarks.allocators import SINGLE_CALLS, Allocator, Calls, Crossing, index_of
from benchmarks.driver import ORDERING, Driver


class _CuPy(Allocator):
    unlike: ClassVar = SINGLE_CALLS
    kind: ClassVar[str]

    def __init__(self, device: str) -> None:
        self.cupy: Any = import_module("cupy")
        self.cupy.cuda.Device(index_of(device)).use()

    @contextmanager
    def opened(self, limit: int | None = None) -> Iterator[Calls]:
        """Return a fresh pool's `malloc`, whose memory is given back by dropping the pointer."""
        _ = limit
        pool = getattr(self.cupy.cuda, self.kind)()
        pool.free_all_blocks()
        try:
            yield Calls(names={"malloc": pool.malloc}, allocate="malloc({size})")
        finally:
            self.cupy.cuda.Device().synchronize()
            pool.free_all_blocks()


class CuPyPool(_CuPy):
    """Its own best-fit pool."""

    name = "CuPy pool"
    kind = "MemoryPool"


class CuPyAsyncPool(_CuPy):
    """The driver's pool, by `MemoryAsyncPool`."""

    name = "CuPy async pool"
    kind = "MemoryAsyncPool"


ARENA = 16 << 30
"""Bytes of the arena, as many as all rows need: it does not grow. Its own default is half of what is free."""
FIRST = 2 << 20
"""Bytes that the pool begins with, so that it grows as the others do."""


class _Rmm(Allocator):
    unlike: ClassVar = SINGLE_CALLS

    def __init__(self, device: str) -> None:
        self.driver = Driver(index_of(device))
        self.rmm: Any = import_module("rmm")
        self.streams: Any = import_module("rmm.pylibrmm.stream")

    def resource(self) -> Any:  # noqa: ANN401 - of a package that may be absent
        raise NotImplementedError

    @contextmanager
    def opened(self, limit: int | None = None) -> Iterator[Calls]:
        """Return a fresh resource's calls on the default stream."""
        _ = limit
        resource = self.resource()
        names = {
            "allocate": resource.allocate,
            "deallocate": resource.deallocate,
            "stream": self.streams.DEFAULT_STREAM,
        }
        yield Calls(names=names, allocate="allocate({size}, stream)", release="deallocate({block}, {size}, stream)")
        self.driver.synchronize()

    @contextmanager
    def crossing(self) -> Iterator[Crossing]:
        """Return a deallocation that names the other stream."""
        resource = self.resource()
        with self.driver.two_streams() as streams:
            names = {
                **streams,
                "allocate": resource.allocate,
                "deallocate": resource.deallocate,
                "producer": self.streams.Stream(Handle(int(streams["first"]))),
                "consumer": self.streams.Stream(Handle(int(streams["second"]))),
            }
            yield Crossing(
                names=names,
                statement=f"block = allocate({{size}}, producer)\n{ORDERING}deallocate(block, {{size}}, consumer)",
            )
            self.driver.synchronize()
            # It must go before the streams that it has seen.
            names.clear()
            del resource

    def close(self) -> None:
        """Leave the device's context."""
        self.driver.close()


class Handle:
    """A stream by its number, for RMM, which takes `__cuda_stream__`."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __cuda_stream__(self) -> tuple[int, int]:
        """Return version and handle."""
        return 0, self.number


class RmmArena(_Rmm):
    """Its arenas over plain device memory."""

    name = "RMM arena"
    unlike: ClassVar = {**SINGLE_CALLS, "growth": "it has all of its memory from the start"}

    def resource(self) -> Any:  # noqa: ANN401 - of a package that may be absent
        """Make the resource."""
        return self.rmm.mr.ArenaMemoryResource(self.rmm.mr.CudaMemoryResource(), arena_size=ARENA)


class RmmPool(_Rmm):
    """Its growing pool over plain device memory."""

    name = "RMM pool"

    def resource(self) -> Any:  # noqa: ANN401 - of a package that may be absent
        """Make the resource."""
        return self.rmm.mr.PoolMemoryResource(self.rmm.mr.CudaMemoryResource(), initial_pool_size=FIRST)


class RmmAsync(_Rmm):
    """The driver's pool behind its interface."""

    name = "RMM async"

    def resource(self) -> Any:  # noqa: ANN401 - of a package that may be absent
        """Make the resource."""
        return self.rmm.mr.CudaAsyncMemoryResource()


class CudaCore(Allocator):
    """`cuda.core.DeviceMemoryResource` with a pool of its own."""

    name = "cuda.core"
    unlike: ClassVar = SINGLE_CALLS

    def __init__(self, device: str) -> None:
        self.core: Any = import_module("cuda.core")
        self.index = index_of(device)
        self.device = self.core.Device(self.index)
        self.device.set_current()

    def resource(self) -> Any:  # noqa: ANN401 - of a package that may be absent
        """Make a resource over a new pool, which keeps what was freed."""
        return self.core.DeviceMemoryResource(self.index, self.core.DeviceMemoryResourceOptions())

    @contextmanager
    def opened(self, limit: int | None = None) -> Iterator[Calls]:
        """Return `allocate` on the default stream and `close` of the buffer."""
        _ = limit
        resource = self.resource()
        names = {"allocate": resource.allocate, "stream": self.device.default_stream}
        yield Calls(names=names, allocate="allocate({size}, stream=stream)", release="{block}.close()")
        self.device.sync()

    @contextmanager
    def crossing(self) -> Iterator[Crossing]:
        """Return a close that names the other stream."""
        resource = self.resource()
        producer = self.device.create_stream()
        names = {
            "allocate": resource.allocate,
            "producer": producer,
            "consumer": self.device.create_stream(),
            "fence": producer.record(),
        }
        ordering = "producer.record(fence)\nconsumer.wait(fence)"
        made = f"block = allocate({{size}}, stream=producer)\n{ordering}\nblock.close(consumer)"
        yield Crossing(names=names, statement=made)
        self.device.sync()
