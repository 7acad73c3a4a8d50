"""The ends of a channel: one for each of several producers and consumers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, Self, TypeVar

from anyio import ClosedResourceError, EndOfStream

from asyncmem.pool.alarm import alarm

if TYPE_CHECKING:
    from types import TracebackType

    from asyncmem.pipeline.channel import Channel

T = TypeVar("T")


class _End(Generic[T]):
    """One side of a channel, counted as open until `close`."""

    _sending, _receiving = 0, 0

    def __init__(self, channel: Channel[T], stream: object) -> None:
        self._channel = channel
        self._stream = stream
        self._open = True
        channel.count_ends(self._sending, self._receiving)

    def __repr__(self) -> str:
        return f"<asyncmem.{type(self).__name__} of {self._channel!r}: {'open' if self._open else 'closed'}>"

    def clone(self) -> Self:
        """Make another end of the same side and stream, to be closed by itself.

        Raises:
            ClosedResourceError: This one has been closed.
        """
        self._need_open()
        return type(self)(self._channel, self._stream)

    def __del__(self) -> None:
        if getattr(self, "_open", False) and not self._channel.closed:
            alarm(f"{self!r} was dropped; the other side is not told before it is closed", ResourceWarning)

    def close(self) -> None:
        """Close this end; the last of its side closes that side of the channel. Twice is fine."""
        if self._open:
            self._open = False
            self._channel.count_ends(-self._sending, -self._receiving)

    def __enter__(self) -> Self:
        """Answer the end itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close it."""
        self.close()

    async def __aenter__(self) -> Self:
        """Answer the end itself."""
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close it."""
        self.close()

    def _need_open(self) -> None:
        if not self._open:
            raise ClosedResourceError


class Sender(_End[T]):
    """A producer's end of a channel. Made by `Channel.sender`."""

    _sending = 1

    async def send(self, item: T) -> None:
        """Pass an item on; see `Channel.send`."""
        self._need_open()
        await self._channel.send(item, stream=self._stream)

    def send_nowait(self, item: T) -> None:
        """Pass an item on without a wait; see `Channel.send_nowait`."""
        self._need_open()
        self._channel.send_nowait(item, stream=self._stream)


class Receiver(_End[T]):
    """A consumer's end of a channel, also by ``async for``. Made by `Channel.receiver`."""

    _receiving = 1

    async def receive(self) -> T:
        """Wait for the next item; see `Channel.receive`."""
        self._need_open()
        return await self._channel.receive(stream=self._stream)

    def receive_nowait(self) -> T:
        """Take the next item without a wait; see `Channel.receive_nowait`."""
        self._need_open()
        return self._channel.receive_nowait(stream=self._stream)

    def __aiter__(self) -> Self:
        """Receive until the end."""
        return self

    async def __anext__(self) -> T:
        """Wait for the next item, until the channel has been closed for sending and nothing is left in it."""
        try:
            return await self.receive()
        except EndOfStream:
            raise StopAsyncIteration from None
