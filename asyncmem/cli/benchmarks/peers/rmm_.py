"""RMM's memory resources, by the calls on the resource itself, which are the cheapest that its Python has."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from importlib import import_module
from typing import Any, ClassVar

from asyncmem.cli.benchmarks.peers.cupy_ import ALONE
from asyncmem.cli.benchmarks.peers.driver import Driver
from asyncmem.cli.benchmarks.peers.peer import Crossing, Peer
from asyncmem.cli.benchmarks.peers.way import Way

FIRST = 1 << 30
"""Bytes that the pool and the arena begin with; their own defaults are half of what the device has free."""


class _Rmm(Peer):
    unlike: ClassVar = ALONE

    def __init__(self, index: int) -> None:
        self.driver = Driver(index)
        self.rmm: Any = import_module("rmm")
        self.streams: Any = import_module("rmm.pylibrmm.stream")

    def resource(self) -> Any:  # noqa: ANN401 - of a package that may be absent
        raise NotImplementedError

    @contextmanager
    def opened(self, limit: int | None = None) -> Iterator[Way]:
        """Answer a fresh resource's calls on the default stream."""
        _ = limit
        resource = self.resource()
        names = {
            "allocate": resource.allocate,
            "deallocate": resource.deallocate,
            "stream": self.streams.DEFAULT_STREAM,
        }
        yield Way(names=names, allocate="allocate({size}, stream)", release="deallocate({block}, {size}, stream)")
        self.driver.synchronize()

    def crossing(self, *, ordered: bool) -> AbstractContextManager[Crossing]:
        """Answer a deallocation that names the other stream."""
        return self._crossing("record(fence, first)\nwait(second, fence, 0)\n" if ordered else "")

    @contextmanager
    def _crossing(self, ordering: str) -> Iterator[Crossing]:
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
                statement=f"block = allocate({{size}}, producer)\n{ordering}deallocate(block, {{size}}, consumer)",
            )
            self.driver.synchronize()


class Handle:
    """A stream by its number, for whoever takes `__cuda_stream__`."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __cuda_stream__(self) -> tuple[int, int]:
        """Answer version and handle."""
        return 0, self.number


class RmmArena(_Rmm):
    """Its arenas over plain device memory."""

    name = "RMM arena"

    def resource(self) -> Any:  # noqa: ANN401 - of a package that may be absent
        """Make the resource, with as much as all rows need: an arena does not grow."""
        return self.rmm.mr.ArenaMemoryResource(self.rmm.mr.CudaMemoryResource(), arena_size=32 * FIRST)


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
