"""What devices over a driver's command queues do alike, whichever driver that is: segments, streams, and the device."""

from __future__ import annotations

import bisect
import contextlib
import threading
import weakref
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, Final, Generic, Protocol, TypeVar

from asyncmem.devices.base import Device, Segment, Stream
from asyncmem.devices.fences import FencePoller, PolledFence
from asyncmem.devices.host_memory import PAGE
from asyncmem.devices.streams import StreamBook
from asyncmem.errors import DeviceError, InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class SegmentBook:
    """Knows segments of whole pages of host memory by their addresses."""

    def __init__(self, device: str) -> None:
        """Serve the device of that name."""
        self.device = device
        self._starts: list[int] = []
        self._segments: list[Segment] = []
        # Re-entrant: a finalizer may interrupt the holder on the same thread and give back.
        self._lock = threading.RLock()

    def enlist(self, segment: Segment) -> None:
        """Note a segment that is out."""
        with self._lock:
            at = bisect.bisect_left(self._starts, segment.address)
            self._starts.insert(at, segment.address)
            self._segments.insert(at, segment)

    def withdraw(self, segment: Segment) -> None:
        """Forget a segment, before its address can be reused.

        Raises:
            InvalidRequest: It is not out.
        """
        with self._lock:
            at = bisect.bisect_left(self._starts, segment.address)
            if self._segments[at : at + 1] != [segment]:
                raise InvalidRequest("segment", segment, f"a segment of {self.device!r} that is not given back yet")
            del self._starts[at], self._segments[at]

    def find(self, address: int, nbytes: int) -> Segment | None:
        """Return the segment in which a range lies as a whole, if there is one."""
        with self._lock:
            at = bisect.bisect_right(self._starts, address) - 1
            one = self._segments[at] if at >= 0 else None
            return one if one is not None and address + nbytes <= one.address + one.nbytes else None


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
        """Return a fence behind everything in a queue so far, of any library."""

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


class Counting(Protocol):
    """The part of a driver that every device has."""

    calls: int
    """How many there have been."""


class Addressed(Protocol):
    """A buffer, or an array over one."""

    @property
    def address(self) -> int:
        """Where its first byte is."""

    @property
    def nbytes(self) -> int:
        """How many there are."""


class QueueDevice(Device, Generic[S, F]):
    """A device whose streams are queues, and of which several objects share one place."""

    granularity = PAGE
    driver: Counting
    streams: QueueStreams[S, Any, F]

    def __init__(self, index: int) -> None:
        """Begin with a name, and without waits.

        Raises:
            InvalidRequest: `index` is negative.
        """
        if index < 0:
            raise InvalidRequest("index", index, "a device number from 0")
        self.index = index
        self.name = f"{self.kind}:{index}"
        self._closed = False
        self._poller = FencePoller(f"asyncmem {self.name} fences")
        # A device that is forgotten without being closed leaves no thread either.
        weakref.finalize(self, self._poller.stop).atexit = False

    @property
    def driver_calls(self) -> int:
        """How many calls of the driver this object has made."""
        return self.driver.calls

    def create_stream(self, name: str | None = None) -> S:
        """Make a stream with a queue of its own."""
        self.check_open()
        return self.streams.create(name)

    def record_all(self) -> F:
        """Return a fence behind everything submitted to every stream of this object, also to those that are gone.

        Queues that it was not shown are not covered.
        """
        return self.streams.record_all()

    def peer_copy(self, target: int, source: int, nbytes: int, source_device: Device, stream: Stream) -> None:
        """Copy from another object for the same device, or from its page-locked memory.

        Raises:
            InvalidRequest: It is another device.
        """
        self._check_peers("source_device", [source_device])
        self.copy(target, source, nbytes, stream)

    def grant_access(self, peers: Sequence[Device]) -> None:
        """Do nothing for other objects of the same device: their memory is the same.

        Raises:
            InvalidRequest: One of `peers` is another device.
        """
        self._check_peers("peers", peers)

    def close(self) -> None:
        """Wait for all work, then end the threads (blocks); twice is fine. Segments stay as they are."""
        if not self._closed:
            with contextlib.suppress(DeviceError):  # a lost device runs nothing any more
                self.record_all().block()
            self._closed = True
        self.streams.end_threads()
        self._poller.stop()
        self._poller.join()

    def check_open(self) -> None:
        """Refuse what needs an open device."""
        if self._closed:
            raise InvalidRequest("device", self, "a device that is open")

    @abstractmethod
    def shares_memory_with(self, peer: Device) -> bool:
        """Return whether addresses of the other mean the same here."""

    def _check_peers(self, what: str, peers: Sequence[Device]) -> None:
        for peer in peers:
            if not self.shares_memory_with(peer):
                raise InvalidRequest(what, peer, f"another object for {self.name!r}: its memory is its own")
