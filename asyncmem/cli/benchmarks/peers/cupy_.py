"""CuPy's two pools: its own, and the driver's behind its interface."""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any, ClassVar

from asyncmem.cli.benchmarks.peers.peer import Peer
from asyncmem.cli.benchmarks.peers.way import Way

ALONE: dict[str, str] = {
    "batch": "a hundred single calls: there is no call for many",
    "await_hit": "nothing to await",
}


class _CuPy(Peer):
    unlike: ClassVar = ALONE
    kind: ClassVar[str]

    def __init__(self, index: int) -> None:
        self.cupy: Any = import_module("cupy")
        self.cupy.cuda.Device(index).use()

    @contextmanager
    def opened(self, limit: int | None = None) -> Iterator[Way]:
        """Answer a fresh pool's `malloc`, whose memory is given back by dropping the pointer."""
        _ = limit
        pool = getattr(self.cupy.cuda, self.kind)()
        pool.free_all_blocks()
        try:
            yield Way(names={"malloc": pool.malloc}, allocate="malloc({size})")
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
