"""Read a loader ahead of its consumer, and have its batches on the device when they are asked for."""

import sys
import weakref
from collections.abc import AsyncIterable, Callable, Iterable, Sized
from typing import Any, Self, final

from asyncmem.arrays import Array
from asyncmem.core import Buffer
from asyncmem.errors import InvalidRequest
from asyncmem.pipeline.read_ahead import Batch, ReadAhead, TaskReadAhead, ThreadReadAhead
from asyncmem.pipeline.resources import Memory, share_of
from asyncmem.pipeline.trees import map_leaves
from asyncmem.text import quoted
from asyncmem.units import parse_count, parse_duration


@final
class Prefetcher:
    """Reads the next batches of a loader ahead, onto the device: ``for x, y in prefetcher.wrap(loader)``.

    A thread reads the loader, or a task if it is asynchronous; other threads stage its batches in page-locked memory,
    and streams of the prefetcher copy them. `stream` waits for a batch when you get it, and for no later one.

    The arrays of a batch are in one buffer, which is freed when you drop them, behind the work of `stream`. There
    should be memory for `ahead` batches besides those that you hold. With less memory, reading waits; without memory
    for one more, it waits for ever, unless you give a `timeout`. A ``for`` holds a batch until it has the next, so it
    needs memory for two. A loader must not change a batch that it has returned.

    Args:
        pool: A pool, a budget, or the name of a device.
        ahead: The most batches that are read ahead.
        pinned: Whether to stage ordinary memory in page-locked memory; else the driver does so, more slowly.
        stream: The stream that uses the batches; None for the device's default stream.
        workers: How many threads stage batches; several share a large batch.
        convert: Called with each array when you get its batch; its result replaces the array: `torch.from_dlpack`.
        timeout: The most seconds that reading waits for a batch's memory, or text such as "500 ms"; then `PoolTimeout`
            is raised in its place.
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
        self.ahead = parse_count(ahead, what="ahead", least=1, most=1 << 20)
        self.workers = parse_count(workers, what="workers", least=1, most=1024)
        self._pinned = pinned
        self._stream = stream
        if convert is not None and not callable(convert):
            raise InvalidRequest("convert", convert, "something to call with an array, such as torch.from_dlpack")
        self._convert = convert
        self._timeout = None if timeout is None else parse_duration(timeout)
        self._tag = tag

    def __repr__(self) -> str:
        return (
            f"<asyncmem.pipeline.Prefetcher of {quoted(self._share.name)}: {self.ahead} ahead, {self.workers} workers>"
        )

    def wrap(self, loader: Iterable[object] | AsyncIterable[object]) -> "Prefetched":
        """Return an iterable to use instead of a loader, by ``for`` or ``async for``, as often as the loader.

        A batch may be nested: tuples, lists, dicts and dataclasses of arrays and of other objects, which are passed
        through. Arrays are host arrays of numpy, torch or others, by DLPack or the buffer protocol, with numbers or
        bools as elements; arrays on a device are passed through too.

        Args:
            loader: Anything that is iterated over, such as torch's DataLoader. It is read ahead, so an iterator that is
                left early has given more than came out; what is left of a generator is closed.

        Raises:
            InvalidRequest: It cannot be iterated over.
        """
        if not isinstance(loader, Iterable | AsyncIterable):
            raise InvalidRequest("loader", loader, "something to iterate over")
        return Prefetched(self, loader)


@final
class Prefetched:
    """A loader that is read ahead. Made by `Prefetcher.wrap`.

    Each ``for`` and ``async for`` is an iteration of its own. Leaving one early ends its threads and frees the batches
    read ahead: a ``for`` at once, an ``async for`` soon. Batches that you got are yours.

    Nothing outlives a ``with`` or ``async with`` block: at the end of ``async with prefetcher.wrap(loader) as batches``
    all threads have ended, and the batches that it returned are freed, even if you still hold them.
    """

    def __init__(self, prefetcher: Prefetcher, loader: Iterable[object] | AsyncIterable[object]) -> None:
        self._prefetcher = prefetcher
        self._loader = loader
        self._under_way: list[ReadAhead] = []
        self._given: weakref.WeakSet[Buffer] = weakref.WeakSet()

    def __repr__(self) -> str:
        return f"<asyncmem.pipeline.Prefetched {self._loader!r}>"

    def __len__(self) -> int:
        """Return how many batches the loader says that it has."""
        if isinstance(self._loader, Sized):
            return len(self._loader)
        raise TypeError(f"{type(self._loader).__name__!r} has no len()")

    def __bool__(self) -> bool:
        """Return True: whether there are batches is not known before they are read."""
        return True

    def __iter__(self) -> "Batches":
        """Begin an iteration whose consumer may block."""
        if not isinstance(self._loader, Iterable):
            raise InvalidRequest("loader", self._loader, 'one for "for"', hint='"async for" reads it')
        return Batches(self._begin(ThreadReadAhead(self._prefetcher, self._loader)), self._deliver)

    def __aiter__(self) -> "AsyncBatches":
        """Begin an iteration whose consumer awaits."""
        if isinstance(self._loader, AsyncIterable):
            return AsyncBatches(self._begin(TaskReadAhead(self._prefetcher, self._loader)), self._deliver)
        return AsyncBatches(self._begin(ThreadReadAhead(self._prefetcher, self._loader)), self._deliver)

    def close(self, timeout: float = 5.0) -> None:
        """End all iterations, free their batches, and wait for their threads (blocks for at most `timeout` seconds).

        Not on an event loop that one of the iterations is on: there, await `aclose`.
        """
        under_way = self._stop()
        for one in under_way:
            one.join(timeout)

    async def aclose(self, timeout: float = 5.0) -> None:
        """End all iterations, free their batches, and wait for their threads, for at most `timeout` seconds.

        Cancelled: it does so all the same.
        """
        under_way = self._stop()
        for one in under_way:
            await one.join_async(timeout)

    def _begin(self, read_ahead: ReadAhead) -> ReadAhead:
        self._under_way = [*(one for one in self._under_way if not one.workers.ended.done), read_ahead]
        return read_ahead

    def _deliver(self, batch: Batch) -> Any:  # noqa: ANN401 -- as nested as the loader's own
        """Order the user's stream behind a batch, and return what comes out."""
        assert batch.buffer is not None
        convert = self._prefetcher._convert
        try:
            if batch.layout.placements:
                batch.buffer.use_on(batch.buffer.device.stream_of(self._prefetcher._stream))
            self._given.add(batch.buffer)
            if convert is None:
                return batch.tree
            return map_leaves(batch.tree, lambda leaf: convert(leaf) if isinstance(leaf, Array) else leaf)
        except BaseException:
            batch.free()
            raise

    def _stop(self) -> list[ReadAhead]:
        under_way, self._under_way = self._under_way, []
        for one in under_way:
            one.stop()
        for buffer in list(self._given):
            buffer.free()
        return under_way

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """End all iterations and free their batches."""
        self.close()

    async def __aenter__(self) -> Self:
        """Return itself."""
        return self

    async def __aexit__(self, *_: object) -> None:
        """End all iterations and free their batches."""
        await self.aclose()


_SOON = 60.0  # seconds, for threads that have nothing left to do


class _Iteration:
    """What both kinds of iteration have in common. The threads hold no reference to it, so dropping it ends them."""

    def __init__(self, read_ahead: ReadAhead, deliver: Callable[[Batch], Any]) -> None:
        self._read_ahead = read_ahead
        self._deliver = deliver
        read_ahead.start()

    def close(self, timeout: float = 5.0) -> None:
        """End the iteration, and wait for its threads on this thread (blocks for at most `timeout` seconds).

        Not on an event loop that the iteration is on: there, await `aclose`.
        """
        self._read_ahead.stop()
        self._read_ahead.join(timeout)

    async def aclose(self, timeout: float = 5.0) -> None:
        """End the iteration, and wait for its threads for at most `timeout` seconds, also where it is cancelled."""
        self._read_ahead.stop()
        await self._read_ahead.join_async(timeout)


@final
class Batches(_Iteration):
    """One iteration of a consumer that may block. Several threads may share it; each batch is returned once."""

    def __iter__(self) -> Self:
        """Return itself."""
        return self

    def __next__(self) -> Any:  # noqa: ANN401 -- as nested as the loader's own
        """Return the next batch; blocks until it is there, but not until its data is: `stream` waits for that.

        Raises:
            PoolTimeout: Its memory was not there in time. Likewise whatever the loader raised in its place.
        """
        with self._read_ahead.next_batch() as batch:
            batch.completed.block()  # a signal's handler may raise here
        if self._read_ahead.redeem(batch):
            return self._deliver(batch)
        self._read_ahead.join(_SOON)
        raise StopIteration

    def __del__(self) -> None:
        if hasattr(self, "_read_ahead") and not sys.is_finalizing():
            self.close()


@final
class AsyncBatches(_Iteration):
    """One iteration of a consumer that awaits. Several tasks may share it; each batch is returned once."""

    def __aiter__(self) -> Self:
        """Return itself."""
        return self

    async def __anext__(self) -> Any:  # noqa: ANN401 -- as nested as the loader's own
        """Return the next batch; waits until it is there, but not until its data is: `stream` waits for that.

        Raises:
            PoolTimeout: Its memory was not there in time. Likewise whatever the loader raised in its place.

        Cancelled: the batch is still the next.
        """
        with self._read_ahead.next_batch() as batch:
            await batch.completed.wait()
        if self._read_ahead.redeem(batch):
            return self._deliver(batch)
        await self._read_ahead.join_async(_SOON)
        raise StopAsyncIteration

    def __del__(self) -> None:
        if hasattr(self, "_read_ahead"):
            self._read_ahead.stop()
