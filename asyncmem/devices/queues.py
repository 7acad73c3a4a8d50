"""What the host and devices over a driver's command queues do alike: the device, and segments with addresses."""

from __future__ import annotations

import bisect
import contextlib
import threading
import weakref
from abc import ABC, abstractmethod
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final, Generic, Protocol, TypeVar

from asyncmem.devices.base import Device, MemoryInfo, Segment, Stream, numbered, whole_segment
from asyncmem.devices.fences import FencePoller
from asyncmem.devices.host_memory import PAGE, Bytes, bytes_at, bytes_of
from asyncmem.devices.streams import F, QueueBook, QueueStream, WorkQueue
from asyncmem.errors import DeviceError, InvalidRequest, OutOfMemoryError
from asyncmem.facts import OutOfMemoryFacts

if TYPE_CHECKING:
    from collections.abc import Sequence

Q = TypeVar("Q", bound=QueueStream[Any])
D = TypeVar("D", bound="Counting")

_ADDRESS: Final = attrgetter("address")


class QueueDevice(Device, Generic[Q, F]):
    """A device whose streams are queues, and of which several objects share one place."""

    granularity = PAGE
    stream_kind: type[Q]

    def __init__(self, name: str) -> None:
        """Begin with a name, and no stream."""
        self.name = name
        self.book: QueueBook[Q, F] = QueueBook(name)

    @abstractmethod
    def shares_memory_with(self, peer: Device) -> bool:
        """Return whether addresses of the other mean the same here."""

    @abstractmethod
    def _open_queue(self, name: str, queue: Any) -> WorkQueue[F]:  # noqa: ANN401  # a driver's own
        """Make a queue of work, over one of other code where that is not None."""

    @abstractmethod
    def _copy(self, target: Bytes, source: Bytes, stream: Stream) -> None:
        """Copy, in the order of `stream`, what is not empty."""

    def create_stream(self, name: str | None = None) -> Q:
        """Make a stream with a queue of its own."""
        self.check_open()
        return self._new_stream(name)

    def copy(self, target: int, source: int, nbytes: int, stream: Stream) -> None:
        """Copy in the order of `stream`."""
        if nbytes:
            self._copy(bytes_at(target, nbytes), bytes_at(source, nbytes), stream)

    def copy_in(self, address: int, source: memoryview, stream: Stream) -> None:
        """Copy host bytes to `address` in the order of `stream`; `copy_holds_up` tells whether it **blocks**."""
        origin = bytes_of(source)
        if origin.size:
            self._copy(bytes_at(address, origin.size), origin, stream)

    def copy_out(self, target: memoryview, address: int, stream: Stream) -> None:
        """Copy to host bytes in the order of `stream`; `copy_holds_up` tells whether it **blocks**."""
        goal = bytes_of(target, writable=True)
        if goal.size:
            self._copy(goal, bytes_at(address, goal.size), stream)

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
        """Take no more work and end the threads after what is queued (blocks); twice is fine."""
        self._closed = True
        self.book.end()

    def _new_stream(self, name: str | None = None, handle: int | None = None, queue: object = None) -> Q:
        handle = self.book.next_handle() if handle is None else handle
        name = name or f"stream-{handle}"
        return self.book.enlist(self.stream_kind(self, name, handle, self._open_queue(name, queue)))

    def _check_peers(self, what: str, peers: Sequence[Device]) -> None:
        for peer in peers:
            if not self.shares_memory_with(peer):
                raise InvalidRequest(what, peer, f"another object for {self.name!r}: its memory is its own")


class Counting(Protocol):
    """The part of a driver that every device has."""

    calls: int
    """How many there have been."""


class SegmentSpace(ABC, Generic[D]):
    """The segments that a driver gave out for all objects of one device, known by their addresses."""

    def __init__(self, most: int) -> None:
        """Begin with none; the driver gives at most so many bytes in one piece."""
        self.most = most
        self._segments: list[Segment] = []  # by address
        # Re-entrant: a finalizer may interrupt the holder on the same thread and give back.
        self._lock = threading.RLock()
        self._calling = threading.RLock()  # over calls of the driver, which those who only look do not wait for

    @abstractmethod
    def free(self) -> int:
        """Return the bytes that could still be taken (reads files)."""

    @abstractmethod
    def get(self, driver: D, nbytes: int) -> tuple[int, object] | None:
        """Get memory (blocks): its address, and what it is given back by. None where the driver has too little."""

    @abstractmethod
    def put_back(self, driver: D, segment: Segment) -> None:
        """Give memory back (blocks)."""

    def take(self, device: Device, driver: D, nbytes: int, kind: str) -> Segment:
        """Get a segment of whole pages (blocks).

        Raises:
            OutOfMemoryError: There is too little, or the driver gives no piece as large.
            DeviceError: The driver fails otherwise.
        """
        nbytes, kind = whole_segment(nbytes, kind, device.segment_kinds, PAGE)
        whole = nbytes + PAGE  # no driver promises that memory begins with a page
        with self._calling:
            free = self.free()
            found = self.get(driver, whole) if whole <= min(free, self.most) else None
            if found is None:
                bound = f"at most {self.most >> 20} MiB in one piece, which is all that the driver gives out"
                advice = (bound,) if whole > self.most else ()
                facts = OutOfMemoryFacts(asked=nbytes, device=device.name, device_free=free, advice=advice)
                raise OutOfMemoryError(facts)
            segment = Segment(-(-found[0] // PAGE) * PAGE, nbytes, kind, found[1])
            self._enlist(segment)
            return segment

    def give_back(self, device: Device, driver: D, segment: Segment) -> None:
        """Give a segment back (blocks); where the driver fails, it is still out.

        Raises:
            InvalidRequest: It is not out.
        """
        with self._calling:
            with self._lock:
                at = bisect.bisect_left(self._segments, segment.address, key=_ADDRESS)
                if self._segments[at : at + 1] != [segment]:
                    raise InvalidRequest("segment", segment, f"a segment of {device.name!r} that is not given back yet")
                del self._segments[at]  # before its address can be used again
            try:
                self.put_back(driver, segment)
            except BaseException:
                self._enlist(segment)
                raise

    def find(self, address: int, nbytes: int) -> Segment | None:
        """Return the segment in which a range lies as a whole, if there is one."""
        with self._lock:
            at = bisect.bisect_right(self._segments, address, key=_ADDRESS) - 1
            one = self._segments[at] if at >= 0 else None
            return one if one is not None and address + nbytes <= one.address + one.nbytes else None

    def _enlist(self, segment: Segment) -> None:
        with self._lock:
            bisect.insort(self._segments, segment, key=_ADDRESS)


class DriverDevice(QueueDevice[Q, F]):
    """A device over the queues of a driver, which are asked for fences."""

    driver: Counting
    space: SegmentSpace[Any]

    def __init__(self, index: int) -> None:
        """Begin with a name, and without waits.

        Raises:
            InvalidRequest: `index` is negative.
        """
        super().__init__(numbered(self.kind, index))
        self.index = index
        self._poller = FencePoller(f"asyncmem {self.name} fences")
        # A device that is forgotten without being closed leaves no thread either.
        weakref.finalize(self, self._poller.stop).atexit = False

    @property
    def driver_calls(self) -> int:
        """How many calls of the driver this object has made."""
        return self.driver.calls

    def memory(self) -> MemoryInfo:
        """Return what this process has not taken; of memory of the host's, no more than is free there (blocks)."""
        return MemoryInfo(free=self.space.free(), total=self.capacity)

    def allocate_segment(self, nbytes: int, kind: str = "auto", stream: Stream | None = None) -> Segment:
        """Get memory (blocks), usable by every stream at once."""
        self.check_open()
        self.stream_of(stream)
        return self.space.take(self, self.driver, nbytes, kind)

    def free_segment(self, segment: Segment) -> None:
        """Give a segment back to the driver (blocks)."""
        self.space.give_back(self, self.driver, segment)

    @abstractmethod
    def record_all(self) -> F:
        """Return a fence behind everything submitted to every stream of this object, also to those that are gone.

        Queues that it was not shown are not covered.
        """

    def close(self) -> None:
        """Wait for all work, then end the threads (blocks); twice is fine. Segments stay as they are."""
        if not self._closed:
            with contextlib.suppress(DeviceError):  # a lost device runs nothing any more
                self.record_all().block()
        super().close()
        self._poller.stop()
        self._poller.join()
