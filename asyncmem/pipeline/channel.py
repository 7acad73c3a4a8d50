"""A channel: items go from producers to consumers, and their memory comes from a quota that bounds how many."""

import itertools
from collections.abc import Awaitable, Sequence
from functools import partial
from typing import Generic, Protocol, Self, TypeAlias, TypeVar, Unpack

from anyio import BrokenResourceError, ClosedResourceError, EndOfStream

from asyncmem.arrays import Array
from asyncmem.core import Buffer
from asyncmem.devices import Fence, Stream
from asyncmem.errors import InvalidRequest
from asyncmem.pipeline.report import ChannelStats
from asyncmem.pipeline.tasks import ItemQueue
from asyncmem.pipeline.trees import fence_behind, order_behind
from asyncmem.pool import Budget
from asyncmem.pool.alarm import alarm
from asyncmem.pool.pool import pool_of
from asyncmem.pool.share import RequestTerms, Share
from asyncmem.text import quoted
from asyncmem.units import Size, parse_count, parse_size

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

Message: TypeAlias = tuple[T, Stream | None, Fence | None]
"""An item, and the stream and the fence that it comes behind where its producer named one."""

_numbers = itertools.count(1)


class _Receives(Protocol[T_co]):
    """What can be iterated over until nothing more comes."""

    async def receive(self) -> T_co: ...

    def __aiter__(self) -> Self:
        """Receive until the end."""
        return self

    async def __anext__(self) -> T_co:
        """Wait for the next item, until the channel has been closed for sending and nothing is left in it."""
        try:
            return await self.receive()
        except EndOfStream:
            raise StopAsyncIteration from None


class Channel(_Receives[T]):
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
        limit = parse_size(nbytes, what="nbytes")
        if not 0 < limit <= pool.capacity():
            raise InvalidRequest("nbytes", nbytes, f"1 byte to the {pool.capacity()} bytes of {quoted(pool.name)}")
        self._max_items = max_items
        self._permits: ItemQueue[None] | None = None
        if max_items is not None:
            self._permits = ItemQueue()
            for _ in range(parse_count(max_items, what="max_items", least=1, most=1 << 20)):
                self._permits.put(None)
        self._budget = pool.budget(name or f"channel-{next(_numbers)}", limit=limit)
        self._limit = limit
        self._items: ItemQueue[Message[T]] = ItemQueue()
        self._senders = self._receivers = 0
        self._closed = False
        self._broken: Exception | None = None

    def __repr__(self) -> str:
        state = "failed" if self._broken else "closed" if self._closed else "open"
        return f"<asyncmem.Channel {quoted(self._budget.name)} of {self._limit} bytes: {state}, {len(self)} items>"

    def __len__(self) -> int:
        """Return how many items wait to be received."""
        return len(self._items)

    def __bool__(self) -> bool:
        """Return True: an empty channel is one, too."""
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

    def allocate(self, size: int | str, **terms: Unpack[RequestTerms]) -> Awaitable[Buffer]:
        """Start a request for an item's memory, to be awaited; see `AsyncMemoryPool.allocate_async`."""
        return self._budget.allocate_async(size, **terms)

    async def empty(
        self, shape: int | Sequence[int], dtype: object = "float32", **terms: Unpack[RequestTerms]
    ) -> Array:
        """Allocate an array for an item; see `AsyncMemoryPool.empty`."""
        return await self._budget.empty(shape, dtype, **terms)

    def stats(self) -> ChannelStats:
        """Return the figures of this moment."""
        memory = self._budget.stats()
        return ChannelStats(
            items=len(self),
            max_items=self._max_items,
            senders=self._senders,
            receivers=self._receivers,
            waiting_to_send=0 if self._permits is None else self._permits.getters,
            waiting_to_receive=self._items.getters,
            waiting_for_memory=memory.waiting,
            held_bytes=memory.allocated_bytes,
            peak_bytes=memory.peak_allocated,
            limit_bytes=self._limit,
        )

    # -- items -------------------------------------------------------------------------------------------------------

    async def send(self, item: T, *, stream: object = None) -> None:
        """Pass an item on; waits only for `max_items`.

        Args:
            item: Belongs to its receiver from here on.
            stream: Where the producer's last work on it was queued, if that is not the home of its buffers.

        Raises:
            ClosedResourceError: The channel has been closed for sending.
            BrokenResourceError: It has failed, or all receivers are closed.

        Cancelled: the item was not sent and is still the sender's.
        """
        message = self._packed(item, stream)
        await (self._items.checkpoint_sometimes() if self._permits is None else self._permits.get())
        self._need_open()
        self._items.put(message)

    def send_nowait(self, item: T, *, stream: object = None) -> None:
        """Pass an item on as `send` does, without a wait.

        Raises:
            WouldBlock: `max_items` wait to be received already.
            ClosedResourceError: As in `send`; likewise `BrokenResourceError`.
        """
        message = self._packed(item, stream)
        if self._permits is not None:
            self._permits.get_nowait()
        self._items.put(message)

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
        return self._unpacked(await self._items.get(), on)

    def receive_nowait(self, *, stream: object = None) -> T:
        """Take the next item as `receive` does, without a wait.

        Raises:
            WouldBlock: There is none yet.
            EndOfStream: As in `receive`; likewise `BrokenResourceError`.
        """
        on = self._stream_of(stream)
        return self._unpacked(self._items.get_nowait(), on)

    def _packed(self, item: T, stream: object) -> Message[T]:
        self._need_open()
        on = self._stream_of(stream)
        return item, on, fence_behind(item, on)

    def _unpacked(self, message: Message[T], on: Stream | None) -> T:
        item, before, fence = message
        if self._permits is not None:
            self._permits.put(None)
        if on is not None:
            order_behind(item, None if before is on else fence, on)
        return item

    def _stream_of(self, stream: object) -> Stream | None:
        return None if stream is None else pool_of(self._budget).device.stream_of(stream)

    def sender(self, *, stream: object = None) -> "Sender[T]":
        """Make an endpoint for one of several producers; once all of them are closed, nothing more will be sent.

        Args:
            stream: Where this producer's work on its items is queued, if that is not the home of their buffers.
        """
        self._need_open()
        return Sender(self, stream)

    def receiver(self, *, stream: object = None) -> "Receiver[T]":
        """Make an endpoint for one of several consumers; once all of them are closed, sending fails.

        Args:
            stream: Where this consumer works on its items: each is in order there when it is received.
        """
        return Receiver(self, stream)

    # -- endpoints -----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """End the sending: what is in the channel is still received, and then `EndOfStream`. Twice is fine."""
        if not self._closed:
            self._end()

    def fail(self, error: Exception) -> None:
        """Break the channel: items in it are dropped, and both sides get `BrokenResourceError` because of `error`."""
        if self._broken is None:
            self._broken = error
            self._items.clear()
            self._end()

    async def __aenter__(self) -> Self:
        """Return the channel itself."""
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Drop what is left and end the quota; what was received stays valid."""
        self.fail(error if isinstance(error, Exception) else ClosedResourceError())
        self._budget.close()

    def count_endpoints(self, sending: int, receiving: int) -> None:
        """Count an endpoint that was made, or (-1) closed."""
        self._senders += sending
        self._receivers += receiving
        if sending < 0 and not self._senders:
            self.close()
        if receiving < 0 and not self._receivers:
            self.fail(ClosedResourceError())

    def _end(self) -> None:
        self._closed = True
        self._items.end(partial(self._error, EndOfStream))
        if self._permits is not None:
            self._permits.end(partial(self._error, ClosedResourceError))

    def _need_open(self) -> None:
        if self._closed:
            raise self._error(ClosedResourceError)

    def _error(self, closed: type[Exception]) -> Exception:
        if self._broken is None:
            return closed()
        broken = BrokenResourceError()
        broken.__cause__ = self._broken
        return broken


class _Endpoint(Generic[T]):
    """One side of a channel, counted as open until `close`."""

    _sending, _receiving = 0, 0

    def __init__(self, channel: Channel[T], stream: object) -> None:
        self._whole = channel
        self._stream = stream
        self._open = True
        channel.count_endpoints(self._sending, self._receiving)

    @property
    def _channel(self) -> Channel[T]:
        if not self._open:
            raise ClosedResourceError
        return self._whole

    def __repr__(self) -> str:
        return f"<asyncmem.{type(self).__name__} of {self._whole!r}: {'open' if self._open else 'closed'}>"

    def clone(self) -> Self:
        """Make another endpoint of the same side and stream, to be closed by itself.

        Raises:
            ClosedResourceError: This one has been closed.
        """
        return type(self)(self._channel, self._stream)

    def __del__(self) -> None:
        if getattr(self, "_open", False) and not self._whole.closed:
            alarm(f"{self!r} was dropped; the other side is not told before it is closed", ResourceWarning)

    def close(self) -> None:
        """Close this endpoint; the last of its side closes that side of the channel. Twice is fine."""
        if self._open:
            self._open = False
            self._whole.count_endpoints(-self._sending, -self._receiving)

    def __enter__(self) -> Self:
        """Return the endpoint itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close it."""
        self.close()

    async def __aenter__(self) -> Self:
        """Return the endpoint itself."""
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close it."""
        self.close()


class Sender(_Endpoint[T]):
    """A producer's endpoint of a channel. Made by `Channel.sender`."""

    _sending = 1

    async def send(self, item: T) -> None:
        """Pass an item on; see `Channel.send`."""
        await self._channel.send(item, stream=self._stream)

    def send_nowait(self, item: T) -> None:
        """Pass an item on without a wait; see `Channel.send_nowait`."""
        self._channel.send_nowait(item, stream=self._stream)


class Receiver(_Endpoint[T], _Receives[T]):
    """A consumer's endpoint of a channel, also by ``async for``. Made by `Channel.receiver`."""

    _receiving = 1

    async def receive(self) -> T:
        """Wait for the next item; see `Channel.receive`."""
        return await self._channel.receive(stream=self._stream)

    def receive_nowait(self) -> T:
        """Take the next item without a wait; see `Channel.receive_nowait`."""
        return self._channel.receive_nowait(stream=self._stream)
