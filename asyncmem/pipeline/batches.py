"""Batches on their way to a device: read from a loader, given memory, then staged and copied by workers."""

from __future__ import annotations

import inspect
import threading
from typing import TYPE_CHECKING, final

from asyncmem.arrays import Layout
from asyncmem.pipeline.filling import fill, fill_by_way_of, holds_up
from asyncmem.pipeline.leaves import host_array
from asyncmem.pipeline.memory import Patience, pool_of
from asyncmem.pipeline.nest import changed
from asyncmem.pipeline.streams import Lent

if TYPE_CHECKING:
    from collections.abc import AsyncIterable, AsyncIterator, Iterable, Iterator

    from asyncmem.core import Buffer, Ready
    from asyncmem.devices import Stream
    from asyncmem.pipeline.crew import Crew
    from asyncmem.pipeline.leaves import HostArray
    from asyncmem.pool import AsyncMemoryPool, Budget, Copy, Request


@final
class Filler:
    """A stream that does nothing but copy batches, one after another."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self._copies: list[Copy] = []

    def wait(self) -> None:
        """Wait until the batch before is there (blocks), so that a consumer who runs ahead of the device is held up.

        Else all that the device has not come to would be kept on the host.
        """
        for copy in self._copies:
            copy.block()

    def has(self, copies: list[Copy]) -> None:
        """Hear what it copies now."""
        self._copies = copies


@final
class Fillers:
    """Fillers that take turns.

    Each batch has one to itself while it is on its way and while the next ones are: whoever waits for the home of a
    batch's memory then waits for that batch, and for none of those that were read ahead of it.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._lock = threading.Lock()
        self._fillers: list[Filler] = []

    def of(self, pool: AsyncMemoryPool, number: int) -> Filler:
        """Answer the filler for the batch of a number."""
        with self._lock:
            if not self._fillers:
                self._lent = Lent(pool._opened)
                self._fillers = [Filler(self._lent.stream("prefetch")) for _ in range(self._count)]
            return self._fillers[number % self._count]


@final
class Staging:
    """How the batches of one pass get to the device."""

    def __init__(
        self, share: AsyncMemoryPool | Budget, fillers: Fillers, *, pinned: bool, timeout: float | None, tag: str | None
    ) -> None:
        self.pool = pool_of(share)
        self.pinned = pinned
        self.tag = tag
        self.patience = Patience()
        self._share = share
        self._fillers = fillers
        self._timeout = timeout

    def begin(self, item: object, number: int) -> StagedBatch:
        """Take an item in, and wait on this thread (blocks) for its memory."""
        batch = StagedBatch(self, self._fillers.of(self.pool, number), item)
        batch.buffer = self.patience.wait(self._ask(batch))
        return batch

    async def begin_async(self, item: object, number: int) -> StagedBatch:
        """Take an item in, and wait for its memory. Cancelled: it has none."""
        batch = StagedBatch(self, self._fillers.of(self.pool, number), item)
        batch.buffer = await self._ask(batch)
        return batch

    def _ask(self, batch: StagedBatch) -> Ready[Buffer] | Request[Buffer]:
        stream, nbytes = batch.filler.stream, batch.layout.nbytes
        return self._share.allocate_async(nbytes, stream=stream, tag=self.tag, timeout=self._timeout)


@final
class StagedBatch:
    """One batch: its arrays lie in one buffer, one behind the other.

    Attributes:
        filler: What copies it.
        layout: Where the arrays lie.
        buffer: Their memory.
        nest: The batch as the loader had it, with arrays of the device once it is finished.
    """

    def __init__(self, staging: Staging, filler: Filler, item: object) -> None:
        self.filler = filler
        self._staging = staging
        self._sources: list[HostArray] = []
        self.nest = changed(item, self._take_out)
        self.layout = Layout.of((source.shape, source.dtype) for source in self._sources)
        self.buffer: Buffer | None = None

    def finish(self, crew: Crew) -> None:
        """Start copying all arrays, for which those that are not page-locked are read by the crew (blocks)."""
        buffer = self.buffer
        assert buffer is not None
        self.filler.wait()
        sources, self._sources = self._sources, []
        pieces = [(place.offset, one.data) for place, one in zip(self.layout.places, sources, strict=True)]
        pool = self._staging.pool
        if self._staging.pinned and holds_up(pool, pieces):
            request = pool.pinned.allocate_async(buffer.nbytes, stream=buffer.stream, tag=self._staging.tag)
            copies = [fill_by_way_of(self._staging.patience.wait(request), buffer, pieces, crew)]
        else:
            copies = fill(buffer, pieces)
        self.filler.has(copies)
        for copy in copies:
            if not copy.ordered:
                copy.block()
        arrays = iter(self.layout.over(buffer))
        self.nest = changed(self.nest, lambda leaf: next(arrays) if leaf is _TAKEN else leaf)

    def free(self) -> None:
        """Give the memory back; twice is fine."""
        if self.buffer is not None:
            self.buffer.free()

    def _take_out(self, leaf: object) -> object:
        source = host_array(leaf)
        if source is None:
            return leaf
        self._sources.append(source)
        return _TAKEN


_TAKEN = object()


@final
class LoaderSource:
    """Batches of a loader that is iterated over on a thread."""

    def __init__(self, loader: Iterable[object], staging: Staging) -> None:
        self._loader = loader
        self._staging = staging
        self._items: Iterator[object] | None = None

    def read(self, number: int) -> StagedBatch:
        """Read a batch and wait for its memory (blocks)."""
        if self._items is None:
            self._items = iter(self._loader)
        return self._staging.begin(next(self._items), number)

    def close(self) -> None:
        """Let go of the iterator; what is left of a generator is nobody's, because items that were read are gone."""
        items, self._items = self._items, None
        if inspect.isgenerator(items):
            items.close()

    def give_up(self) -> None:
        """End the waiting for memory."""
        self._staging.patience.end()


@final
class AsyncLoaderSource:
    """Batches of a loader that is iterated over in a task."""

    def __init__(self, loader: AsyncIterable[object], staging: Staging) -> None:
        self._loader = loader
        self._staging = staging
        self._items: AsyncIterator[object] | None = None

    async def read(self, number: int) -> StagedBatch:
        """Read a batch and wait for its memory."""
        if self._items is None:
            await self._staging.pool.open()
            self._items = aiter(self._loader)
        return await self._staging.begin_async(await anext(self._items), number)

    async def close(self) -> None:
        """Let go of the iterator, as `LoaderSource.close` does."""
        items, self._items = self._items, None
        if inspect.isasyncgen(items):
            await items.aclose()

    def give_up(self) -> None:
        """End the waiting for memory."""
        self._staging.patience.end()
