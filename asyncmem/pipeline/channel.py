"""A channel: items go from producers to consumers, and their memory comes from a quota that bounds how many."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Generic, Self, TypeAlias, TypeVar

from anyio import BrokenResourceError, ClosedResourceError, EndOfStream

from asyncmem.errors import InvalidRequest
from asyncmem.pipeline.ends import Receiver, Sender
from asyncmem.pipeline.line import Line
from asyncmem.pipeline.parcels import fence_of, order_behind
from asyncmem.pipeline.report import ChannelStats
from asyncmem.pool.share import Share
from asyncmem.units import parse_count, parse_size

if TYPE_CHECKING:
    from collections.abc import Awaitable, Sequence
    from types import TracebackType

    from asyncmem.arrays import Array
    from asyncmem.core import Buffer
    from asyncmem.devices import Fence, Stream
    from asyncmem.pool import Budget
    from asyncmem.units import Size

T = TypeVar("T")

Parcel: TypeAlias = "tuple[T, Stream | None, Fence | None]"
"""An item, and the stream and the fence that it comes behind where its producer named one."""

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
        if not isinstance(pool, Share):
            raise InvalidRequest("pool", pool, "a pool or a budget")
        places = None if max_items is None else parse_count(max_items, what="max_items", least=1)
        if parse_size(nbytes, what="nbytes") == 0:
            raise InvalidRequest("nbytes", nbytes, "more than 0 bytes")
        budget = pool.budget(name or f"channel-{next(_numbers)}", limit=nbytes)
        if budget.own_limit() > pool.capacity():
            budget.close()
            raise InvalidRequest("nbytes", nbytes, f"at most the {pool.capacity()} bytes of {pool.name!r}")
        self._budget = budget
        self._items: Line[Parcel[T]] = Line()
        self._max_items = places
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

    def __bool__(self) -> bool:
        """Answer True: an empty channel is one, too."""
        return True

    @property
    def closed(self) -> bool:
        """Whether nothing more can be sent."""
        return self._closed

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

    def stats(self) -> ChannelStats:
        """Answer the figures of this moment."""
        memory = self._budget.stats()
        return ChannelStats(
            items=len(self),
            max_items=self._max_items,
            senders=self._senders,
            receivers=self._receivers,
            waiting_to_send=0 if self._places is None else self._places.takers,
            waiting_to_receive=self._items.takers,
            waiting_for_memory=memory.waiting,
            held_bytes=memory.allocated_bytes,
            peak_bytes=memory.peak_allocated,
            limit_bytes=self._budget.own_limit(),
        )

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
        parcel = self._packed(item, stream)
        await (self._items.pause() if self._places is None else self._places.take())
        self._need_open()
        self._items.put(parcel)

    def send_nowait(self, item: T, *, stream: object = None) -> None:
        """Pass an item on as `send` does, without a wait.

        Raises:
            WouldBlock: `max_items` wait to be received already.
            ClosedResourceError: As in `send`; likewise `BrokenResourceError`.
        """
        parcel = self._packed(item, stream)
        if self._places is not None:
            self._places.take_nowait()
        self._items.put(parcel)

    async def receive(self, *, stream: object = None) -> T:
        """Wait for the next item.

        Args:
            stream: Where the consumer will work on it; None leaves the order of streams to the caller.

        Raises:
            EndOfStream: The channel has been closed for sending, and everything has been received.
            BrokenResourceError: It has failed.

        Cancelled: the item stays in the channel.
        """
        on = self._stream_of(stream)
        return self._unpacked(await self._items.take(), on)

    def receive_nowait(self, *, stream: object = None) -> T:
        """Take the next item as `receive` does, without a wait.

        Raises:
            WouldBlock: There is none yet.
            EndOfStream: As in `receive`; likewise `BrokenResourceError`.
        """
        on = self._stream_of(stream)
        return self._unpacked(self._items.take_nowait(), on)

    def _packed(self, item: T, stream: object) -> Parcel[T]:
        self._need_open()
        on = self._stream_of(stream)
        return item, on, fence_of(item, on)

    def _unpacked(self, parcel: Parcel[T], on: Stream | None) -> T:
        item, before, fence = parcel
        if self._places is not None:
            self._places.put(None)
        if on is not None:
            order_behind(item, None if before is on else fence, on)
        return item

    def _stream_of(self, stream: object) -> Stream | None:
        return None if stream is None else self._budget._opened.device.stream_of(stream)

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
