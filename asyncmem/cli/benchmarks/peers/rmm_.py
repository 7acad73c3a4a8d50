"""RMM's memory resources, by the calls on the resource itself, which are the cheapest that its Python has."""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any, ClassVar

from asyncmem.cli.benchmarks.peers.cupy_ import ALONE
from asyncmem.cli.benchmarks.peers.driver import ORDERING, Driver
from asyncmem.cli.benchmarks.peers.peer import Crossing, Peer
from asyncmem.cli.benchmarks.peers.way import Way

ARENA = 16 << 30
"""Bytes of the arena, as many as all rows need: it does not grow. Its own default is half of what is free."""
FIRST = 2 << 20
"""Bytes that the pool begins with, so that it grows as the others do."""


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

    @contextmanager
    def crossing(self) -> Iterator[Crossing]:
        """Answer a deallocation that names the other stream."""
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
    """A stream by its number, for whoever takes `__cuda_stream__`."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __cuda_stream__(self) -> tuple[int, int]:
        """Answer version and handle."""
        return 0, self.number


class RmmArena(_Rmm):
    """Its arenas over plain device memory."""

    name = "RMM arena"
    unlike: ClassVar = {**ALONE, "growth": "it has all of its memory from the start"}

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
