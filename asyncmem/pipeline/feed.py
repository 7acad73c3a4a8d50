"""Where a run's items come from: an iterable or an async iterable, asked only for what may be in flight."""

from __future__ import annotations

from collections.abc import AsyncIterable, Iterable
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

import anyio

from asyncmem.errors import InvalidRequest
from asyncmem.pipeline.line import Line
from asyncmem.pipeline.mishaps import is_its_own

if TYPE_CHECKING:
    from collections.abc import Callable

A = TypeVar("A")


class Feed(Protocol):
    """Asks a source for items and passes them on."""

    async def run(self) -> None:
        """Do what has to be awaited, in a task of its own."""

    def allow(self, now: float) -> None:
        """Let one more item be in flight from now on."""


class PlainFeed(Generic[A]):
    """Takes from an iterable at once, in whatever step allows it."""

    def __init__(
        self, source: Iterable[A], take_in: Callable[[A, float], None], end: Callable[[BaseException | None], None]
    ) -> None:
        self._items = iter(source)
        self._take_in = take_in
        self._end = end
        self._ended = False

    async def run(self) -> None:
        """Do nothing."""

    def allow(self, now: float) -> None:
        """Take the next item."""
        if self._ended:
            return
        try:
            item = next(self._items)
        except StopIteration:
            self._ended = True
            self._end(None)
        except BaseException as error:
            if not is_its_own(error):
                raise
            self._ended = True
            self._end(error)
        else:
            self._take_in(item, now)


class AwaitedFeed(Generic[A]):
    """Awaits the items of an async iterable, and closes it in the end."""

    def __init__(
        self, source: AsyncIterable[A], take_in: Callable[[A, float], None], end: Callable[[BaseException | None], None]
    ) -> None:
        self._items = aiter(source)
        self._take_in = take_in
        self._end = end
        self._places: Line[float] = Line()  # since when there is each

    async def run(self) -> None:
        """Await the items."""
        try:
            while True:
                allowed = await self._places.take()
                try:
                    item = await anext(self._items)
                except StopAsyncIteration:
                    break
                self._take_in(item, allowed)
                del item
        except BaseException as error:
            if not is_its_own(error):
                raise
            self._end(error)
        else:
            self._end(None)
        finally:
            close = getattr(self._items, "aclose", None)
            if close is not None:
                with anyio.CancelScope(shield=True):
                    await close()

    def allow(self, now: float) -> None:
        """Let the next item be awaited."""
        self._places.put(now)


def feed_from(
    source: Iterable[A] | AsyncIterable[A],
    take_in: Callable[[A, float], None],
    end: Callable[[BaseException | None], None],
) -> Feed:
    """Make the feed for a source.

    Raises:
        InvalidRequest: It is neither an iterable nor an async iterable.
    """
    if isinstance(source, AsyncIterable):
        return AwaitedFeed(source, take_in, end)
    if not isinstance(source, Iterable):
        raise InvalidRequest("source", source, "an iterable or an async iterable")
    return PlainFeed(source, take_in, end)
