"""A device that only pretends, for tests without a GPU: the same in every run, and strict about stream order.

Time is virtual unless asked otherwise, driver calls take as long as a real driver's, every call is written down with
its thread, any call can be made to fail, and work that touches memory in no certain order raises at once.
"""

import math
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal

from asyncmem.devices.base import Device, MemoryInfo, Move, Remapped, Segment, Span, Stream, whole_segment
from asyncmem.devices.host_memory import PAGE, Bytes, Pages, bytes_at, bytes_of, total_memory
from asyncmem.devices.simulated.calls import Call, CallLog, Latencies
from asyncmem.devices.simulated.order import OrderChecker
from asyncmem.devices.simulated.paging import InventedAddresses, Paging
from asyncmem.devices.simulated.stream import SimulatedFence, SimulatedStream
from asyncmem.devices.simulated.timeline import Clock, Timeline, VirtualClock, WallClock, check_seconds
from asyncmem.devices.streams import StreamBook
from asyncmem.errors import InvalidRequest, OutOfMemoryError
from asyncmem.facts import OutOfMemoryFacts
from asyncmem.figures import format_size
from asyncmem.lazy import np
from asyncmem.units import Size, parse_size

_DEFAULT_CAPACITY = 80 << 30


class Simulated(Device):
    """A pretended device with streams, fences, a clock, a bounded memory and faults on demand."""

    kind = "simulated"
    segment_kinds: tuple[str, ...] = ("stream_ordered", "direct")
    granularity = PAGE
    reads_all = False  # whether every device of the machine may touch its memory, as it may page-locked host memory

    def __init__(
        self,
        capacity: Size | None = None,
        *,
        clock: Literal["virtual", "wall"] = "virtual",
        autojump: bool = True,
        latencies: Latencies | None = None,
        backing: bool = False,
        check_order: bool = True,
        page: Size = "2 MiB",
        index: int = 0,
        beside: "Simulated | None" = None,
        peer_rate: Size | None = None,
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
            page: The unit in which memory is mapped under reserved addresses, a power of two; 0: it cannot be.
            index: The number in the name.
            beside: Another device of the same machine: it has the same clock and order checker, its fences can be
                waited for here, and `grant_access` opens its memory.
            peer_rate: Bytes a second that copies from such a device make; without it they take no time.
        """
        self.name = f"simulated:{index}"
        self.host_readable = backing
        self.dlpack_device = (1, 0) if backing else (12, index)  # kDLCPU, kDLExtDev
        self.machine: list[Simulated] = [] if beside is None else beside.machine
        self.number = len(self.machine)
        if clock not in ("virtual", "wall"):
            raise InvalidRequest("clock", clock, "'virtual' or 'wall'")
        if beside is None:
            own: Clock = VirtualClock(autojump) if clock == "virtual" else WallClock()
            self.timeline = Timeline(own, OrderChecker(strict=check_order))
        else:
            self.timeline = beside.timeline
        self.clock: Clock = self.timeline.clock
        self.log = CallLog(self.name, self.clock, latencies or Latencies())
        self.peers: list[Device] = []
        self._peer_rate = math.inf if peer_rate is None else parse_size(peer_rate, what="peer_rate")
        self.reserved = 0
        self.elsewhere = 0
        self.capacity = _DEFAULT_CAPACITY if capacity is None else parse_size(capacity, what="capacity")
        self._heeds_suggestions = capacity is None
        number = self.number
        self._addresses = Pages() if backing else InventedAddresses(PAGE, number)
        self.page = parse_size(page, what="page")
        if self.page & (self.page - 1):
            raise InvalidRequest("page", page, "a power of two, or 0")
        ranges = Pages(self.page, reserved=True) if backing else InventedAddresses(self.page, number, reserved=True)
        self._paging = Paging(self.page, ranges, self.timeline, self.log, self._count)
        self._segments: dict[int, Segment] = {}
        self._book: StreamBook[SimulatedStream] = StreamBook(
            self.name, None if beside is None else beside._book.handles
        )
        self.default_stream: SimulatedStream = self._book.enlist(SimulatedStream(self, "default", 0))
        self._visitor: SimulatedStream | None = None
        self._pinned: SimulatedPinned | None = None
        self.machine.append(self)  # last: other threads look through the machine's devices

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
        """Make a later driver call raise, before it has done anything.

        Args:
            name: Which kind of call, as the names in `calls`, or "*" for any.
            nth: Which of them from now on, counted from 1.
            times: How many in a row fail from there.
            error: What is raised; a `DeviceError` by default.

        Raises:
            InvalidRequest: There is no such call, or a number is not from 1 on.
        """
        self.log.fail(name, nth, times, error)

    def advance(self, seconds: float) -> None:
        """Move the virtual clock on; callbacks that fall due run on this thread."""
        check_seconds("seconds", seconds)
        self._virtual().jump(self.now + seconds)

    def run_until_idle(self) -> None:
        """Move the virtual clock to the end of all work that ends."""
        self._virtual().jump(self.timeline.idle_at())

    def memory(self) -> MemoryInfo:
        """Ask how much memory there is (blocks)."""
        self.log.enter("memory")
        return MemoryInfo(free=max(0, self._free()), total=self.capacity)

    def take_elsewhere(self, size: Size) -> None:
        """Take memory of the device as another process would; what is out stays out.

        Where they take more than is free, the driver asks this process to give some back: `over_budget` goes up.
        """
        nbytes = parse_size(size)
        with self.timeline.lock:
            self.elsewhere += nbytes
            self.over_budget += self._free() < 0

    def give_back_elsewhere(self, size: Size) -> None:
        """Give back memory that was taken as another process."""
        nbytes = parse_size(size)
        if nbytes > self.elsewhere:
            raise InvalidRequest("size", size, f"at most the {format_size(self.elsewhere)} that others have")
        with self.timeline.lock:
            self.elsewhere -= nbytes

    def suggest_capacity(self, nbytes: int) -> None:
        """Take the limit of the pool as capacity, unless there is one or segments are out."""
        with self.timeline.lock:
            if self._heeds_suggestions and not self.reserved:
                self.capacity = nbytes

    def allocate_segment(self, nbytes: int, kind: str = "auto", stream: Stream | None = None) -> Segment:
        """Get a segment (blocks); a "stream_ordered" one must first be used in the order of `stream`."""
        home = self._book.find(stream)
        nbytes, kind = whole_segment(nbytes, kind, self.segment_kinds, self.granularity)
        # A driver refuses quickly: time grows with what it has to map.
        fits = nbytes <= self._free()
        self.log.enter("allocate_segment", nbytes, cost=f"allocate_{kind}" if fits else "")
        with self.timeline.lock:
            self._count(nbytes)
            address = self._addresses.take(nbytes)
            self.timeline.checker.map(address, nbytes, home.timeline_key if kind == "stream_ordered" else None)
            segment = self._segments[address] = Segment(address, nbytes, kind)
            return segment

    def free_segment(self, segment: Segment) -> None:
        """Give a segment back (blocks).

        Raises:
            StreamOrderError: The host has not seen all work on it done.
        """
        if self._segments.get(segment.address) is not segment:
            raise InvalidRequest("segment", segment, f"a segment of {self.name!r} that is not given back yet")
        self.log.enter("free_segment", segment.nbytes, cost="free")
        with self.timeline.lock:
            self.timeline.checker.unmap(segment.address, segment.nbytes)
            del self._segments[segment.address]
            self.reserved -= segment.nbytes
            self._addresses.give_back(segment.address)

    def reserve(self, nbytes: int) -> int:
        """Keep a range of addresses with no memory behind it."""
        return self._paging.reserve(nbytes) if self.page else super().reserve(nbytes)

    def unreserve(self, address: int, nbytes: int) -> None:
        """Give a range of addresses back, in which nothing is mapped."""
        if not self.page:
            super().unreserve(address, nbytes)
        self._paging.unreserve(address, nbytes)

    def remap(self, out: Sequence[Span], into: Sequence[Span], moves: Sequence[Move] = ()) -> Remapped:
        """Change what lies behind reserved addresses (blocks); the calls are "unmap", "create", "map" and so on.

        Raises:
            InvalidRequest: A span is not mapped as one, or is no free part of a range; nothing is done then.
            StreamOrderError: The host has not seen all work on what is unmapped done.
        """
        return self._paging.remap(out, into, moves) if self.page else super().remap(out, into, moves)

    def create_stream(self, name: str | None = None) -> SimulatedStream:
        """Make a stream."""
        self.log.enter("create_stream")
        handle = self._book.next_handle()
        return self._book.enlist(SimulatedStream(self, name or f"stream-{handle}", handle))

    def stream_of(self, source: object) -> SimulatedStream:
        """Return the stream meant by None, a stream of this device, a handle, or an object with `__cuda_stream__`."""
        return self._book.find(source)

    def streams(self) -> list[SimulatedStream]:
        """Return the live streams."""
        return self._book.alive()

    def record_all(self) -> SimulatedFence:
        """Return a fence behind everything submitted to every stream."""
        self.log.enter("record_all")
        return SimulatedFence(self, *self.timeline.record_all())

    def fill(self, address: int, nbytes: int, value: int, stream: Stream) -> None:
        """Set bytes, as work that takes no time."""
        effect = partial(bytes_at(address, nbytes).fill, value)
        self._submit("fill", nbytes, stream, effect, [], [(address, nbytes)])

    def copy(self, target: int, source: int, nbytes: int, stream: Stream) -> None:
        """Copy, as work that takes no time."""
        effect = partial(np.copyto, bytes_at(target, nbytes), bytes_at(source, nbytes))
        self._submit("copy", nbytes, stream, effect, [(source, nbytes)], [(target, nbytes)])

    def copy_in(self, address: int, source: memoryview, stream: Stream) -> None:
        """Copy from the host, as work that takes no time."""
        origin = bytes_of(source)
        effect = partial(np.copyto, bytes_at(address, origin.size), origin)
        self._submit("copy_in", origin.size, stream, effect, self._pinned_part(origin), [(address, origin.size)])

    def copy_out(self, target: memoryview, address: int, stream: Stream) -> None:
        """Copy to the host, as work that takes no time; without backing the target is left alone."""
        goal = bytes_of(target, writable=True)
        effect = partial(np.copyto, goal, bytes_at(address, goal.size))
        self._submit("copy_out", goal.size, stream, effect, [(address, goal.size)], self._pinned_part(goal))

    def peer_copy(self, target: int, source: int, nbytes: int, source_device: Device, stream: Stream) -> None:
        """Copy from another simulated device, as work that takes no time unless there is a `peer_rate`.

        Devices that are not beside each other have a clock each: there the host must have seen done what the device
        without `stream` does.
        """
        other = _same_kind("source_device", source_device)
        self.log.enter("peer_copy", nbytes)
        real = self.host_readable and other.host_readable
        effect = partial(np.copyto, bytes_at(target, nbytes), bytes_at(source, nbytes)) if real else None
        if other.machine is self.machine and isinstance(stream, SimulatedStream):
            stream.submit(nbytes / self._peer_rate, [(source, nbytes)], [(target, nbytes)], effect)
        else:
            other._stream_for(stream).submit(0.0, [(source, nbytes)], [], None)
            self._stream_for(stream).submit(0.0, [], [(target, nbytes)], effect)

    def grant_access(self, peers: Sequence[Device]) -> None:
        """Let the streams of other simulated devices touch the memory of this one."""
        found = [_same_kind("peers", peer) for peer in peers]
        self.log.enter("grant_access")
        self.peers.extend(found)

    def pinned(self) -> "Simulated":
        """Return host memory that copies of this device read and write, which the order checker follows too."""
        with self.timeline.lock:
            if self._pinned is None:
                self._pinned = SimulatedPinned(self)
            return self._pinned

    def holds(self, address: int) -> bool:
        """Return whether an address lies in a segment of this device, or in memory that it has mapped."""
        inside = any(one.address <= address < one.address + one.nbytes for one in list(self._segments.values()))
        return inside or self._paging.holds(address)

    def close(self) -> None:
        """Wait for the callbacks that are due by the wall clock (blocks)."""
        self.log.enter("close")
        self.clock.close()

    def _count(self, nbytes: int) -> None:
        with self.timeline.lock:
            free = max(0, self._free())
            if nbytes > free:
                facts = OutOfMemoryFacts(asked=nbytes, device=self.name, reserved=self.reserved, device_free=free)
                raise OutOfMemoryError(facts)
            self.reserved += nbytes

    def _free(self) -> int:
        return self.capacity - self.reserved - self.elsewhere

    def _submit(
        self,
        call: str,
        nbytes: int,
        stream: Stream,
        effect: Callable[[], None],
        reads: Sequence[Span],
        writes: Sequence[Span],
    ) -> None:
        self.log.enter(call, nbytes)
        self._book.find(stream).submit(0.0, reads, writes, effect if self.host_readable else None)

    def _pinned_part(self, host: Bytes) -> Sequence[Span]:
        # Host memory that no device of the machine has prepared is not checked.
        address = int(host.ctypes.data)
        ours = any(one.reads_all and one.holds(address) for one in self.machine)
        return [(address, host.size)] if ours and host.size else []

    def _stream_for(self, stream: Stream) -> SimulatedStream:
        # Another device's stream is behind nothing of this one but what the host has seen, as a new stream is.
        if stream.device is self.default_stream.device:
            return self._book.find(stream)
        if self._visitor is None:
            self._visitor = self.create_stream("peers")
        return self._visitor

    def _virtual(self) -> VirtualClock:
        if isinstance(self.clock, VirtualClock):
            return self.clock
        raise InvalidRequest("clock", "wall", "a device with the virtual clock")


class SimulatedPinned(Simulated):
    """Host memory prepared for copies of one simulated device, with that device's streams."""

    kind = "simulated_pinned"
    segment_kinds = ("pinned", "direct")
    reads_all = True

    def __init__(self, owner: Simulated) -> None:
        """Use `Simulated.pinned` instead."""
        super().__init__(total_memory(), backing=True, page=0, beside=owner)
        self.name = owner.name.replace("simulated", self.kind)
        self.log = owner.log
        self._book, self.default_stream = owner._book, owner.default_stream
        self._owner = owner

    def create_stream(self, name: str | None = None) -> SimulatedStream:
        """Make a stream of the device that this memory was prepared for."""
        return self._owner.create_stream(name)

    def pinned(self) -> Simulated:
        """Return itself."""
        return self

    def close(self) -> None:
        """Do nothing: the owner closes."""


def _same_kind(what: str, device: Device) -> Simulated:
    if not isinstance(device, Simulated):
        raise InvalidRequest(what, device, "a simulated device")
    return device
