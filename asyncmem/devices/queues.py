"""Streams that are queues of a driver's, our own and those of other code: made, found, and waited for as a whole."""

from __future__ import annotations

import contextlib
import threading
import weakref
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Final, Generic, TypeVar

from asyncmem.devices.base import Stream
from asyncmem.devices.polled import PolledFence
from asyncmem.devices.streams import StreamBook
from asyncmem.errors import DeviceError

if TYPE_CHECKING:
    from collections.abc import Callable

S = TypeVar("S", bound=Stream)
Q = TypeVar("Q")
F = TypeVar("F", bound=PolledFence)

_DEFAULT: Final = 0


class QueueStreams(ABC, Generic[S, Q, F]):
    """Makes and finds streams. It keeps none of them alive, but their queues until what was queued is complete."""

    def __init__(self, device: str) -> None:
        """Serve the device of that name, and know no stream."""
        self.book: StreamBook[S] = StreamBook(device)
        self._by_key: weakref.WeakValueDictionary[int, S] = weakref.WeakValueDictionary()
        self._queues: dict[int, Q] = {}
        self._leaving: list[F] = []
        # Re-entrant: a finalizer may interrupt the holder on the same thread and name a stream.
        self._lock = threading.RLock()

    @abstractmethod
    def new_queue(self) -> Q:
        """Make a queue."""

    @abstractmethod
    def key_of(self, queue: Q) -> int:
        """Return the driver's number of a queue."""

    @abstractmethod
    def stream_over(self, queue: Q, name: str, handle: int) -> S:
        """Make the stream that stands for a queue."""

    @abstractmethod
    def record(self, queue: Q) -> F:
        """Return a fence behind everything in a queue so far, by whomever."""

    @abstractmethod
    def find(self, source: object) -> S:
        """Return the stream that `source` means; see the device's `stream_of`."""

    @abstractmethod
    def record_all(self) -> F:
        """Return a fence behind everything in all queues so far, those of streams that are gone too."""

    def end_threads(self) -> None:  # most have none
        """Wait for the threads of all streams (blocks)."""

    def create(self, name: str | None = None, *, default: bool = False) -> S:
        """Make a stream with a queue of its own."""
        return self._enlist(self.new_queue(), name, _DEFAULT if default else self.book.next_handle())

    def adopt(self, key: int, queue: Callable[[], Q]) -> S:
        """Return the stream that stands for the queue of that number, and make it if there is none yet."""
        with self._lock:
            return self._by_key.get(key) or self._enlist(queue(), None, self.book.next_handle())

    def record_each(self) -> list[F]:
        """Return fences that are together behind everything so far, in the queues of streams that are gone too."""
        with self._lock:
            self._forget_who_is_gone()
            leaving, queues = list(self._leaving), list(self._queues.values())
        return [*leaving, *map(self.record, queues)]

    def _enlist(self, queue: Q, name: str | None, handle: int) -> S:
        stream = self.stream_over(queue, name or f"stream-{handle}", handle)
        with self._lock:
            self._queues[handle] = queue
            self._by_key[self.key_of(queue)] = self.book.enlist(stream)
        # Not at exit: the driver may have gone before us.
        weakref.finalize(stream, self._see_off, handle).atexit = False
        return stream

    def _see_off(self, handle: int) -> None:
        """Remember what a stream that is gone has left in its queue."""
        with self._lock:
            queue = self._queues[handle]
            self._forget_who_is_gone()
            with contextlib.suppress(DeviceError):  # a lost device runs nothing any more
                self._leaving.append(self.record(queue))
            del self._queues[handle]

    def _forget_who_is_gone(self) -> None:
        for fence in list(self._leaving):
            # Asking may run a finalizer, which comes here too.
            if fence.over() and fence in self._leaving:
                self._leaving.remove(fence)
