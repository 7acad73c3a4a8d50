"""Read a loader ahead of whoever consumes it, and have its batches on the device when they are asked for."""

from __future__ import annotations

import weakref
from collections.abc import AsyncIterable, Iterable, Sized
from typing import TYPE_CHECKING, Any, Self, final

from asyncmem.arrays import Array
from asyncmem.errors import InvalidRequest
from asyncmem.pipeline.batches import AsyncLoaderSource, Fillers, LoaderSource, Staging
from asyncmem.pipeline.lookahead import LoopLookahead, ThreadLookahead
from asyncmem.pipeline.memory import share_of, stream_of
from asyncmem.pipeline.nest import changed
from asyncmem.pipeline.passes import AsyncBatches, Batches
from asyncmem.units import parse_count, parse_duration

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from asyncmem.core import Buffer
    from asyncmem.pipeline.batches import StagedBatch
    from asyncmem.pipeline.lookahead import Lookahead
    from asyncmem.pipeline.memory import Memory

_THREADS = "asyncmem prefetch"


@final
class Prefetcher:
    """Has a loader's next batches on the device before they are asked for: ``for x, y in prefetcher.wrap(loader)``.

    A thread reads the loader, or a task where it is asynchronous; others stage what it gives in page-locked memory, and
    streams of the prefetcher's own copy it. `stream` waits for a batch when that comes out, and for no later one.

    The arrays of a batch lie in one buffer, which is freed when they are dropped, behind the work of `stream`. There
    should be memory for `ahead` batches beside those that the consumer holds. Where there is less, reading waits; where
    there is not even one more, it waits for ever, unless `timeout` says how long. A ``for`` holds a batch until it has
    the next, so it needs memory for two. What a loader has given it must not change any more.

    Args:
        pool: A pool, a budget, or the name of a device.
        ahead: How many batches are read before they are asked for, at most.
        pinned: Whether what is not page-locked goes through page-locked memory; else the driver does that, and slower.
        stream: The stream that uses the batches; None for the device's default stream.
        workers: How many threads stage; those that are idle help with the parts of a large batch.
        convert: Called with each array as its batch comes out, for what takes its place: `torch.from_dlpack`.
        timeout: The most seconds that reading waits for a batch's memory, or text such as "500 ms"; then `PoolTimeout`
            comes out in its place.
        tag: A label for reports.

    Raises:
        InvalidRequest: One of the arguments cannot be right.
    """

    def __init__(
        self,
        pool: Memory,
        ahead: int = 2,
        *,
        pinned: bool = True,
        stream: object = None,
        workers: int = 4,
        convert: Callable[[Array], object] | None = None,
        timeout: float | str | None = None,
        tag: str | None = None,
    ) -> None:
        self._share = share_of(pool)
        self.ahead = parse_count(ahead, what="ahead", least=1)
        self.workers = parse_count(workers, what="workers", least=1)
        self._pinned = pinned
        self._stream = stream
        if convert is not None and not callable(convert):
            raise InvalidRequest("convert", convert, "something to call with an array, such as torch.from_dlpack")
        self._convert = convert
        self._timeout = None if timeout is None else parse_duration(timeout)
        self._tag = tag
        # One for each batch that is ahead, for the one that is in use, and for one that is about to be dropped.
        self._fillers = Fillers(self.ahead + 2)

    def __repr__(self) -> str:
        return f"<asyncmem.pipeline.Prefetcher of {self._share.name!r}: {self.ahead} ahead, {self.workers} workers>"

    def wrap(self, loader: Iterable[object] | AsyncIterable[object]) -> Prefetched:
        """Answer what to iterate over instead of a loader, by ``for`` or ``async for``, as often as the loader.

        A batch may be nested: tuples, lists, dicts and dataclasses of arrays and of anything else, which passes as it
        is. Arrays are what numpy, torch or others have on the host, by DLPack or the buffer protocol, with elements
        that are numbers or bools; what is on a device already passes too.

        Args:
            loader: Anything that is iterated over, such as torch's DataLoader. It is read ahead, so an iterator that is
                left early has given more than came out; what is left of a generator is closed.

        Raises:
            InvalidRequest: It cannot be iterated over.
        """
        if not isinstance(loader, Iterable | AsyncIterable):
            raise InvalidRequest("loader", loader, "something to iterate over")
        return Prefetched(self, loader)

    def _read_ahead(self, loader: object, *, in_task: bool) -> Lookahead[StagedBatch]:
        """Make the threads of one pass; in a task of the running loop where the loader is for that, if `in_task`."""
        staging = Staging(self._share, self._fillers, pinned=self._pinned, timeout=self._timeout, tag=self._tag)
        if in_task and isinstance(loader, AsyncIterable):
            source = AsyncLoaderSource(loader, staging)
            return LoopLookahead(source, ahead=self.ahead, workers=self.workers, name=_THREADS)
        assert isinstance(loader, Iterable)
        return ThreadLookahead(LoaderSource(loader, staging), ahead=self.ahead, workers=self.workers, name=_THREADS)

    def _converted(self, batch: StagedBatch) -> object:
        """Order the user's stream behind a batch, and answer what comes out."""
        buffer = batch.buffer
        if buffer is not None and batch.layout.places:
            buffer.use_on(stream_of(buffer.device, self._stream))
        convert = self._convert
        if convert is None:
            return batch.nest
        return changed(batch.nest, lambda leaf: convert(leaf) if isinstance(leaf, Array) else leaf)


@final
class Prefetched:
    """A loader that is read ahead. Made by `Prefetcher.wrap`.

    Each ``for`` and ``async for`` is a pass of its own. One that is left early ends its threads and gives back the
    memory of what was read ahead: a ``for`` at once, an ``async for`` soon. Batches that came out are their consumer's.

    Nothing outlives a ``with`` or ``async with`` block: at the end of ``async with prefetcher.wrap(loader) as batches``
    all threads have ended, and the batches that came out are freed, also those that somebody still holds.
    """

    def __init__(self, prefetcher: Prefetcher, loader: Iterable[object] | AsyncIterable[object]) -> None:
        self._prefetcher = prefetcher
        self._loader = loader
        self._under_way: list[Lookahead[StagedBatch]] = []
        self._given: weakref.WeakSet[Buffer] = weakref.WeakSet()

    def __repr__(self) -> str:
        return f"<asyncmem.pipeline.Prefetched {self._loader!r}>"

    def __len__(self) -> int:
        """Answer how many batches the loader says that it has."""
        if isinstance(self._loader, Sized):
            return len(self._loader)
        raise TypeError(f"{type(self._loader).__name__!r} has no len()")

    def __bool__(self) -> bool:
        """Answer True: whether there are batches is not known before they are read."""
        return True

    def __iter__(self) -> Batches:
        """Begin a pass whose consumer may block."""
        if not isinstance(self._loader, Iterable):
            raise InvalidRequest("loader", self._loader, 'one for "for"', hint='"async for" reads it')
        return Batches(self._read_ahead(in_task=False), self._bring_out)

    def __aiter__(self) -> AsyncBatches:
        """Begin a pass whose consumer awaits."""
        return AsyncBatches(self._read_ahead(in_task=True), self._bring_out)

    def close(self, timeout: float = 5.0) -> None:
        """End all passes, free their batches, and wait for their threads (blocks for at most `timeout` seconds).

        Not on an event loop that one of the passes is on: there, await `aclose`.
        """
        under_way = self._stop()
        for one in under_way:
            one.join(timeout)

    async def aclose(self, timeout: float = 5.0) -> None:
        """End all passes, free their batches, and wait for their threads, for at most `timeout` seconds.

        Cancelled: it does so all the same.
        """
        under_way = self._stop()
        for one in under_way:
            await one.join_async(timeout)

    def _read_ahead(self, *, in_task: bool) -> Lookahead[StagedBatch]:
        found = self._prefetcher._read_ahead(self._loader, in_task=in_task)
        self._under_way = [*(one for one in self._under_way if not one.ended), found]
        return found

    def _bring_out(self, batch: StagedBatch) -> Any:  # noqa: ANN401 -- as nested as the loader's own
        try:
            found = self._prefetcher._converted(batch)
        except BaseException:
            batch.free()
            raise
        if batch.buffer is not None:
            self._given.add(batch.buffer)
        return found

    def _stop(self) -> list[Lookahead[StagedBatch]]:
        under_way, self._under_way = self._under_way, []
        for one in under_way:
            one.stop()
        for buffer in list(self._given):
            buffer.free()
        return under_way

    def __enter__(self) -> Self:
        """Answer itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End all passes and free their batches."""
        self.close()

    async def __aenter__(self) -> Self:
        """Answer itself."""
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End all passes and free their batches."""
        await self.aclose()
