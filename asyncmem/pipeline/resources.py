"""What pipelines, prefetchers and double buffers work with: a pool, and streams."""

import weakref
from collections import defaultdict
from collections.abc import Iterable
from typing import TypeAlias

from asyncmem.devices import Stream
from asyncmem.errors import InvalidRequest
from asyncmem.pool import AsyncMemoryPool, Budget
from asyncmem.runtime import RuntimeDevice
from asyncmem.runtime import device as runtime_device

Memory: TypeAlias = AsyncMemoryPool | Budget | RuntimeDevice | str
"""A pool, a budget of one, or a device whose pool the whole process shares: "cuda:0", `asyncmem.device("cuda:0")`."""


def share_of(memory: object) -> AsyncMemoryPool | Budget:
    """Return the pool or budget that is meant.

    Raises:
        InvalidRequest: It is something else.
    """
    if isinstance(memory, str):
        memory = runtime_device(memory)
    if isinstance(memory, RuntimeDevice):
        memory = memory.pool
    if isinstance(memory, AsyncMemoryPool | Budget):
        return memory
    raise InvalidRequest("pool", memory, "a pool, a budget, or the name of a device")


class BorrowedStreams:
    """Streams for one user, which others may have once that is gone.

    Work that is still queued on them does no harm: the next user comes behind it.
    """

    def __init__(self, pool: AsyncMemoryPool) -> None:
        self._pool = pool
        self._borrowed: list[tuple[str, Stream]] = []
        self._finalizer = weakref.finalize(self, _give_back, weakref.ref(pool), self._borrowed)

    def give_back(self) -> None:
        """Give the streams back for others; twice is fine."""
        self._finalizer()

    def stream(self, name: str) -> Stream:
        """Return a stream of that name that is not in use."""
        try:
            stream = _idle[self._pool][name].pop()
        except (KeyError, IndexError):
            stream = self._pool.device.create_stream(name)
        self._borrowed.append((name, stream))
        return stream


def _give_back(known: weakref.ref[AsyncMemoryPool], streams: Iterable[tuple[str, Stream]]) -> None:
    pool = known()
    if pool is not None:
        idle = _idle.setdefault(pool, defaultdict(list))
        for name, stream in streams:
            idle[name].append(stream)


_idle: weakref.WeakKeyDictionary[AsyncMemoryPool, defaultdict[str, list[Stream]]] = weakref.WeakKeyDictionary()
