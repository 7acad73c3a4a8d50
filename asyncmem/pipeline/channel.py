"""A channel: items go from producers to consumers, and their memory comes from a quota that bounds how many."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Generic, Self, TypeVar

from anyio import BrokenResourceError, ClosedResourceError, EndOfStream

from asyncmem.errors import InvalidRequest
from asyncmem.pipeline.ends import Receiver, Sender
from asyncmem.pipeline.line import Line
from asyncmem.pipeline.parcels import fence_of, order_behind
from asyncmem.units import parse_count

if TYPE_CHECKING:
    from collections.abc import Awaitable, Sequence
    from types import TracebackType

    from asyncmem.core import Array, Buffer
    from asyncmem.devices import Fence, Stream
    from asyncmem.pool import Budget
    from asyncmem.pool.share import Share
    from asyncmem.stats import PoolStats
    from asyncmem.units import Size

T = TypeVar("T")

_numbers = itertools.count(1)


class Channel(Generic[T]):
    """Carries items between tasks of one event loop, bounded by bytes: ``Channel(pool, "64 MiB")``.

    Producers take the memory of their items from the channel, `await channel.allocate(size)`, and wait there when its
    quota is out; `send` itself does not wait. What a consumer receives counts until it is freed. Items are buffers,
    arrays, or tuples, lists, dicts and dataclasses of them, with plain values among them.

    A consumer that names its stream gets its items in order: the stream waits for the work of the buffers' home
    streams, and for that of the stream that the producer named. Freed, a buffer goes home behind the consumer's work.

    It is closed and fails as a memory stream of anyio does, with its exceptions. Several producers or consumers have a
    `sender()` or a `receiver()` each, or share the channel itself.

    Args:
        pool: A pool that is open, or a budget of one; the quota is carved from it.
        nbytes: The quota: the most bytes that the items may hold.
        max_items: The most items that wait to be received; then `send` waits too. None leaves it to the bytes.
        name: What statistics call the quota.

    Raises:
        InvalidRequest: The quota is no size, zero, or more than the pool may have.
    """

    def __init__(self, pool: Share, nbytes: Size, *, max_items: int | None = None, name: str | None = None) -> None:
        places = None if max_items is None else parse_count(max_items, what="max_items", least=1)
        budget = pool.budget(name or f"channel-{next(_numbers)}", limit=nbytes)
        if budget.own_limit() > pool.capacity():
            budget.close()
            raise InvalidRequest("nbytes", nbytes, f"at most the {pool.capacity()} bytes of {pool.name!r}")
        self._budget = budget
        self._items: Line[tuple[T, Stream | None, Fence | None]] = Line()
        self._places: Line[None] | None = None
        if places is not None:
            self._places = Line()
            for _ in range(places):
                self._places.put(None)
        self._senders = self._receivers = 0
        self._closed = False
        self._broken: Exception | None = None

    def __repr__(self) -> str:
        state = "failed" if self._broken else "closed" if self._closed else "open"
        return (
            f"<asyncmem.Channel {self._budget.name!r} of {self._budget.own_limit()} bytes: {state}, {len(self)} items>"
        )

    def __len__(self) -> int:
        """Answer how many items wait to be received."""
        return len(self._items)

    # -- memory ------------------------------------------------------------------------------------------------------

    @property
    def quota(self) -> Budget:
        """The budget that the items' memory comes from, with all the ways to allocate that a pool has."""
        return self._budget

    def allocate(
        self, size: int | str, *, stream: object = None, tag: str | None = None, timeout: float | None = None
    ) -> Awaitable[Buffer]:
        """Start a request for an item's memory, to be awaited; see `AsyncMemoryPool.allocate_async`."""
        return self._budget.allocate_async(size, stream=stream, tag=tag, timeout=timeout)

    async def empty(
        self, shape: int | Sequence[int], dtype: object = "float32", *, stream: object = None, tag: str | None = None
    ) -> Array:
        """Allocate an array for an item; see `AsyncMemoryPool.empty`."""
        return await self._budget.empty(shape, dtype, stream=stream, tag=tag)

    def stats(self) -> PoolStats:
        """Answer the figures of the quota."""
        return self._budget.stats()

    # -- items -------------------------------------------------------------------------------------------------------

    async def send(self, item: T, *, stream: object = None) -> None:
        """Pass an item on; waits only for `max_items`.

        Args:
            item: Belongs to whoever receives it from here on.
            stream: Where the producer's last work on it was queued, if that is not the home of its buffers.

        Raises:
            ClosedResourceError: The channel has been closed for sending.
            BrokenResourceError: It has failed, or nobody is left to receive.

        Cancelled: the item was not sent and is still the sender's.
        """
        self._need_open()
        await (self._items.pause() if self._places is None else self._places.take())
        self._need_open()
        on = None if stream is None else self._budget.flow.pool.device.stream_of(stream)
        self._items.put((item, on, fence_of(item, on)))

    async def receive(self, *, stream: object = None) -> T:
        """Wait for the next item.

        Args:
            stream: Where the consumer will work on it; None leaves the order of streams to the caller.

        Raises:
            EndOfStream: The channel has been closed for sending, and everything has been received.
            BrokenResourceError: It has failed.

        Cancelled: the item stays in the channel.
        """
        item, before, fence = await self._items.take()
        if self._places is not None:
            self._places.put(None)
        if stream is not None:
            on = self._budget.flow.pool.device.stream_of(stream)
            order_behind(item, None if before is on else fence, on)
        return item

    def sender(self, *, stream: object = None) -> Sender[T]:
        """Make an end for one of several producers; once all of them are closed, nothing more will be sent.

        Args:
            stream: Where this producer's work on its items is queued, if that is not the home of their buffers.
        """
        self._need_open()
        return Sender(self, stream)

    def receiver(self, *, stream: object = None) -> Receiver[T]:
        """Make an end for one of several consumers; once all of them are closed, nobody can send any more.

        Args:
            stream: Where this consumer works on its items: each is in order there when it is received.
        """
        return Receiver(self, stream)

    def __aiter__(self) -> Self:
        """Receive until the end, without naming a stream."""
        return self

    async def __anext__(self) -> T:
        """Wait for the next item, until the channel has been closed for sending and nothing is left in it."""
        try:
            return await self.receive()
        except EndOfStream:
            raise StopAsyncIteration from None

    # -- ends --------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """End the sending: what is in the channel is still received, and then `EndOfStream`. Twice is fine."""
        if not self._closed:
            self._closed = True
            self._items.end(self._ending)
            self._refuse_senders()

    def fail(self, error: Exception) -> None:
        """Break the channel: items in it are dropped, and both sides get `BrokenResourceError` because of `error`."""
        if self._broken is None:
            self._closed, self._broken = True, error
            self._items.clear()
            self._items.end(self._ending)
            self._refuse_senders()

    async def __aenter__(self) -> Self:
        """Answer the channel itself."""
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Drop what is left and end the quota; what was received stays valid."""
        self.fail(error if isinstance(error, Exception) else ClosedResourceError())
        self._budget.close()

    def count_ends(self, sending: int, receiving: int) -> None:
        """Count an end that was made, or (-1) closed."""
        self._senders += sending
        self._receivers += receiving
        if sending < 0 and not self._senders:
            self.close()
        if receiving < 0 and not self._receivers:
            self.fail(ClosedResourceError())

    def _refuse_senders(self) -> None:
        if self._places is not None:
            self._places.end(self._refusal)

    def _need_open(self) -> None:
        if self._closed:
            raise self._refusal()

    def _refusal(self) -> Exception:
        return ClosedResourceError() if self._broken is None else self._breakage()

    def _ending(self) -> Exception:
        return EndOfStream() if self._broken is None else self._breakage()

    def _breakage(self) -> Exception:
        broken = BrokenResourceError()
        broken.__cause__ = self._broken
        return broken
