"""A device that only pretends, for tests without a GPU: the same in every run, and strict about stream order.

Time is virtual unless asked otherwise, driver calls take as long as a real driver's, every call is written down with
its thread, any call can be made to fail, and work that touches memory in no certain order raises at once.
"""

import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Literal

from asyncmem.devices.addresses import Addresses, InventedAddresses
from asyncmem.devices.base import Device, MemoryInfo, Segment, Stream
from asyncmem.devices.calls import Call, CallLog
from asyncmem.devices.clock import Clock, VirtualClock, make_clock
from asyncmem.devices.latencies import Latencies
from asyncmem.devices.order import OrderChecker
from asyncmem.devices.pages import PAGE, Pages, bytes_at, bytes_of, total_memory
from asyncmem.devices.simulated_stream import SimulatedFence, SimulatedStream
from asyncmem.devices.streams import StreamBook
from asyncmem.devices.timeline import Range, Timeline
from asyncmem.errors import InvalidRequest, OutOfMemoryError
from asyncmem.facts import OutOfMemoryFacts
from asyncmem.units import Size, format_size, parse_size

_DEFAULT_CAPACITY = 80 << 30


class Simulated(Device):
    """A pretended device with streams, fences, a clock, a bounded memory and faults on demand."""

    kind = "simulated"
    segment_kinds = ("stream_ordered", "direct")
    granularity = PAGE

    def __init__(
        self,
        capacity: Size | None = None,
        *,
        clock: Literal["virtual", "wall"] = "virtual",
        autojump: bool = True,
        latencies: Latencies | None = None,
        backing: bool = False,
        check_order: bool = True,
        index: int = 0,
    ) -> None:
        """Make a device of its own: its memory, clock and streams are shared with no other.

        Args:
            capacity: Bytes it has; without it the first pool's limit, and without that 80 GiB.
            clock: "virtual" stands still until a driver call, a wait or `advance` moves it; "wall" is real time.
            autojump: On the virtual clock a wait moves the time to what it waits for; otherwise it is held until
                another thread or task calls `advance`.
            latencies: What driver calls take; the figures of a real one by default.
            backing: Put real host memory behind the addresses. Copies then really copy, at submission.
            check_order: Raise `StreamOrderError` where order is not certain.
            index: The number in the name.
        """
        self.name = f"simulated:{index}"
        self.host_readable = backing
        self.dlpack_device = (1, 0) if backing else (12, index)  # kDLCPU, kDLExtDev
        self.clock: Clock = make_clock(clock, autojump=autojump)
        self.log = CallLog(self.name, self.clock, latencies or Latencies())
        self.timeline = Timeline(self.clock, OrderChecker() if check_order else None)
        self.reserved = 0
        self.capacity = _DEFAULT_CAPACITY if capacity is None else parse_size(capacity, what="capacity")
        self._heeds_suggestions = capacity is None
        self._addresses: Addresses = Pages() if backing else InventedAddresses(gap=PAGE)
        self._segments: dict[int, Segment] = {}
        self._book: StreamBook[SimulatedStream] = StreamBook(self.name)
        self.default_stream: SimulatedStream = self._book.enlist(SimulatedStream(self, "default", 0))
        self._visitor: SimulatedStream | None = None
        self._pinned: weakref.ref[_SimulatedPinned] | None = None

    def __repr__(self) -> str:
        used = f"{format_size(self.reserved)} of {format_size(self.capacity)}"
        return f"<Simulated {self.name}: {used}, at {self.now:.9f} s>"

    @property
    def now(self) -> float:
        """Seconds on the device's clock."""
        return self.clock.now()

    @property
    def calls(self) -> deque[Call]:
        """The last 65536 driver calls, oldest first."""
        return self.log.recent

    @property
    def driver_calls(self) -> int:
        """How many driver calls there have been."""
        return self.log.counts.total()

    def calls_of(self, name: str) -> list[Call]:
        """Return the calls of that name among the last ones."""
        return [call for call in list(self.log.recent) if call.name == name]

    def fail(self, name: str, nth: int = 1, *, times: int = 1, error: Exception | None = None) -> None:
        """Let a coming driver call raise, before it has done anything.

        Args:
            name: Which kind of call, or "*" for any.
            nth: Which of them from now on, counted from 1.
            times: How many in a row fail from there.
            error: What is raised; a `DeviceError` by default.
        """
        self.log.fail(name, nth, times, error)

    def advance(self, seconds: float) -> None:
        """Move the virtual clock on; callbacks that fall due run on this thread."""
        self._virtual().jump(self.now + seconds)

    def run_until_idle(self) -> None:
        """Move the virtual clock to the end of all work that ends."""
        self._virtual().jump(self.timeline.idle_at())

    def memory(self) -> MemoryInfo:
        """Ask how much memory there is (blocks)."""
        self.log.enter("memory")
        return MemoryInfo(free=max(0, self.capacity - self.reserved), total=self.capacity)

    def suggest_capacity(self, nbytes: int) -> None:
        """Take the limit of the pool as capacity, unless there is one or segments are out."""
        with self.timeline.lock:
            if self._heeds_suggestions and not self._segments:
                self.capacity = nbytes

    def allocate_segment(self, nbytes: int, kind: str = "auto", stream: Stream | None = None) -> Segment:
        """Get a segment (blocks); a "stream_ordered" one must first be used in the order of `stream`."""
        home = self._book.find(stream)
        kind = self.segment_kinds[0] if kind == "auto" else kind
        if kind not in self.segment_kinds or nbytes <= 0:
            raise InvalidRequest("kind, nbytes", (kind, nbytes), f"one of {self.segment_kinds}, a positive number")
        nbytes = -(-nbytes // self.granularity) * self.granularity
        # A driver refuses quickly: time grows with what it has to map.
        fits = nbytes <= self.capacity - self.reserved
        self.log.enter("allocate_segment", nbytes, cost=f"allocate_{kind}" if fits else "")
        with self.timeline.lock:
            free = self.capacity - self.reserved
            if nbytes > free:
                facts = OutOfMemoryFacts(asked=nbytes, device=self.name, reserved=self.reserved, device_free=free)
                raise OutOfMemoryError(facts)
            return self._map(nbytes, kind, home)

    def free_segment(self, segment: Segment) -> None:
        """Give a segment back (blocks).

        Raises:
            StreamOrderError: The host has not seen all work on it done.
        """
        if self._segments.get(segment.address) is not segment:
            raise InvalidRequest("segment", segment, f"a segment of {self.name!r} that is not given back yet")
        self.log.enter("free_segment", segment.nbytes, cost="free")
        with self.timeline.lock:
            self.timeline.unmap(segment.address, segment.nbytes)
            del self._segments[segment.address]
            self.reserved -= segment.nbytes
            self._addresses.give_back(segment.address)

    def create_stream(self, name: str | None = None) -> SimulatedStream:
        """Make a stream."""
        self.log.enter("create_stream")
        handle = self._book.next_handle()
        return self._book.enlist(SimulatedStream(self, name or f"stream-{handle}", handle))

    def stream_of(self, source: object) -> SimulatedStream:
        """Return the stream meant by None, a stream of this device, a handle, or an object with `__cuda_stream__`."""
        return self._book.find(source)

    def record_all(self) -> SimulatedFence:
        """Return a fence behind everything submitted to every stream."""
        self.log.enter("record_all")
        return SimulatedFence(self, *self.timeline.record_all())

    def fill(self, address: int, nbytes: int, value: int, stream: Stream) -> None:
        """Set bytes, as work that takes no time."""
        self.log.enter("fill", nbytes)
        self._submit(stream, writes=[(address, nbytes)])
        if self.host_readable:
            bytes_at(address, nbytes).fill(value)

    def copy(self, target: int, source: int, nbytes: int, stream: Stream) -> None:
        """Copy, as work that takes no time."""
        self.log.enter("copy", nbytes)
        self._submit(stream, reads=[(source, nbytes)], writes=[(target, nbytes)])
        if self.host_readable:
            bytes_at(target, nbytes)[:] = bytes_at(source, nbytes)

    def copy_in(self, address: int, source: memoryview, stream: Stream) -> None:
        """Copy from the host, as work that takes no time."""
        origin = bytes_of(source)
        self.log.enter("copy_in", origin.size)
        self._submit(stream, writes=[(address, origin.size)])
        if self.host_readable:
            bytes_at(address, origin.size)[:] = origin

    def copy_out(self, target: memoryview, address: int, stream: Stream) -> None:
        """Copy to the host, as work that takes no time; without backing the target is left alone."""
        goal = bytes_of(target, writable=True)
        self.log.enter("copy_out", goal.size)
        self._submit(stream, reads=[(address, goal.size)])
        if self.host_readable:
            goal[:] = bytes_at(address, goal.size)

    def grant_access(self, peers: Sequence[Device]) -> None:
        """Note the call (blocks); whether a peer may read is not checked.

        Raises:
            InvalidRequest: One of `peers` is another kind of device.
        """
        for peer in peers:
            _same_kind("peers", peer)
        self.log.enter("grant_access")

    def peer_copy(self, target: int, source: int, nbytes: int, source_device: Device, stream: Stream) -> None:
        """Copy from another simulated device, as work that takes no time.

        The devices have a clock each, so the host must have seen done what the device without `stream` does there.
        """
        other = _same_kind("source_device", source_device)
        self.log.enter("peer_copy", nbytes)
        other._submit(other._stream_for(stream), reads=[(source, nbytes)])
        self._submit(self._stream_for(stream), writes=[(target, nbytes)])
        if self.host_readable and other.host_readable:
            bytes_at(target, nbytes)[:] = bytes_at(source, nbytes)

    def pinned(self) -> "Simulated":
        """Return pretended page-locked memory: real host memory with the streams, the clock and the log of this one."""
        found = self._pinned() if self._pinned is not None else None
        if found is None:
            found = _SimulatedPinned(self)
            self._pinned = weakref.ref(found)
        return found

    def close(self) -> None:
        """Wait for the callbacks that are due by the wall clock (blocks)."""
        self.log.enter("close")
        self.clock.close()

    def _map(self, nbytes: int, kind: str, home: SimulatedStream) -> Segment:
        address = self._addresses.take(nbytes)
        self.timeline.map(address, nbytes, home.handle if kind == "stream_ordered" else None)
        segment = self._segments[address] = Segment(address, nbytes, kind)
        self.reserved += nbytes
        return segment

    def _submit(self, stream: Stream, reads: Iterable[Range] = (), writes: Iterable[Range] = ()) -> None:
        self.timeline.submit(self._book.find(stream).handle, 0.0, reads, writes)

    def _stream_for(self, stream: Stream) -> Stream:
        # Another device's stream is behind nothing of this one but what the host has seen, as a new stream is.
        if stream.device is self.default_stream.device:
            return stream
        if self._visitor is None:
            self._visitor = self.create_stream("peers")
        return self._visitor

    def _virtual(self) -> VirtualClock:
        if isinstance(self.clock, VirtualClock):
            return self.clock
        raise InvalidRequest("clock", "wall", "a device with the virtual clock")


class _SimulatedPinned(Simulated):
    kind = "simulated_pinned"
    segment_kinds = ("pinned", "direct")

    def __init__(self, owner: Simulated) -> None:
        super().__init__(total_memory(), backing=True)
        self.name = owner.name.replace("simulated", self.kind)
        self.clock, self.log, self.timeline = owner.clock, owner.log, owner.timeline
        self._book, self.default_stream = owner._book, owner.default_stream
        self._owner = owner

    def record_all(self) -> SimulatedFence:
        return self._owner.record_all()

    def create_stream(self, name: str | None = None) -> SimulatedStream:
        return self._owner.create_stream(name)

    def pinned(self) -> Simulated:
        return self

    def close(self) -> None:
        """Do nothing: the owner closes."""


def _same_kind(what: str, device: Device) -> Simulated:
    if not isinstance(device, Simulated):
        raise InvalidRequest(what, device, "a simulated device")
    return device
