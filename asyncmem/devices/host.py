"""The host as a device: real memory, and streams that run Python and numpy work on threads of their own.

With it a pipeline is real on a machine without a GPU: work of one stream runs in order, streams overlap (numpy lets go
of the interpreter lock in its loops), and waiting for a fence holds only the stream's own thread.
"""

import functools
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import ParamSpec, TypeVar

import numpy as np

from asyncmem.devices.base import Device, Fence, MemoryInfo, Segment, Stream
from asyncmem.devices.joined import Joined
from asyncmem.devices.lane import Lane
from asyncmem.devices.pages import PAGE, Bytes, Pages, bytes_at, bytes_of, host_memory, total_memory
from asyncmem.devices.streams import StreamBook
from asyncmem.devices.work import LaneFence, Work
from asyncmem.errors import DeviceError, InvalidRequest, OutOfMemoryError
from asyncmem.facts import OutOfMemoryFacts

P = ParamSpec("P")
T = TypeVar("T")


class HostStream(Stream):
    """An ordered queue of callables with a thread of its own, started by the first of them.

    The thread ends when the stream is forgotten or its device closed, after the work that is queued.
    """

    def __init__(self, device: "Host", name: str, handle: int, lane: Lane) -> None:
        """Use `Host.create_stream` instead."""
        self.device = device
        self.name = name
        self.handle = handle
        self._lane = lane
        # Not at exit: daemon threads end with the interpreter anyway.
        weakref.finalize(self, lane.stop).atexit = False

    def __repr__(self) -> str:
        return f"<HostStream {self.name!r} of {self.device.name}>"

    def run(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Work[T]:
        """Queue ``function(*args, **kwargs)`` behind the work submitted so far.

        The arguments are kept until it has run: arrays over a buffer of a pool may be passed, and the buffer may be
        freed at once, because its memory comes back in the order of this stream.

        Returns:
            A fence behind the call. Awaiting it, or its `result()`, gives the call's value or raises its error; an
            error ends neither the stream nor the work queued behind. An error that nobody has seen becomes a warning.

        Raises:
            InvalidRequest: The device has been closed.
        """
        work: Work[T] = Work(self._lane, functools.partial(function, *args, **kwargs))
        work.submit()
        return work

    def record(self) -> Fence:
        """Return a fence behind everything submitted here so far."""
        return LaneFence(self._lane, self._lane.position)

    def wait(self, fence: Fence) -> None:
        """Hold this stream's thread, and nobody else, until `fence` is reached."""
        if isinstance(fence, LaneFence) and fence.lane is self._lane:
            return
        if not fence.done():
            self._lane.submit(functools.partial(_hold, fence))


def _hold(fence: Fence) -> None:
    try:
        fence.block()
    except DeviceError:
        return  # a lost device runs nothing any more, so there is nothing left to be behind of


def _same_memory(what: str, device: Device) -> None:
    if not isinstance(device, Host):
        raise InvalidRequest(what, device, "a host")


class Host(Device):
    """Memory of this machine. Any number may exist; they share the memory and accept each other's streams.

    Closing ends the threads of its streams; a `Host` that is only forgotten ends them as its streams are collected.
    """

    kind = "host"
    name = "host"
    segment_kinds = ("mapped", "direct")
    granularity = PAGE
    host_readable = True
    dlpack_device = (1, 0)  # kDLCPU

    def __init__(self) -> None:
        """Start nothing yet: threads come with the first work."""
        self._driver_calls = 0
        self.capacity = total_memory()
        self._pages = Pages()
        self._lanes: weakref.WeakSet[Lane] = weakref.WeakSet()
        self._lock = threading.RLock()
        self._book: StreamBook[HostStream] = StreamBook(self.name)
        self._closed = False
        self.default_stream: HostStream = self._new_stream("default", 0)

    def __repr__(self) -> str:
        return f"<Host with {len(self._book.alive())} streams>"

    @property
    def driver_calls(self) -> int:
        """How many segments and copies this object has asked for."""
        return self._driver_calls

    def memory(self) -> MemoryInfo:
        """Ask the system how much memory there is (blocks)."""
        return host_memory()

    def suggest_capacity(self, nbytes: int) -> None:
        """Ignore it: the host has a size of its own."""

    def allocate_segment(self, nbytes: int, kind: str = "auto", stream: Stream | None = None) -> Segment:  # noqa: ARG002  # the host's memory is there for all streams at once
        """Map zeroed pages (blocks); they may be used by any stream at once.

        Refuses more than the system says it has available, because it would rather kill the process than refuse.
        """
        if nbytes <= 0:
            raise InvalidRequest("nbytes", nbytes, "a positive number of bytes")
        kind = self._kind(kind)
        nbytes = -(-nbytes // PAGE) * PAGE
        available = host_memory().free
        self._driver_calls += 1
        refusal = OutOfMemoryError(OutOfMemoryFacts(asked=nbytes, device=self.name, device_free=available))
        if nbytes > available:
            raise refusal
        try:
            return Segment(self._pages.take(nbytes), nbytes, kind)
        except (OSError, OverflowError):
            raise refusal from None

    def free_segment(self, segment: Segment) -> None:
        """Unmap the pages (blocks)."""
        self._driver_calls += 1
        self._pages.give_back(segment.address)

    def create_stream(self, name: str | None = None) -> HostStream:
        """Make a stream with a thread of its own, which starts with the first work."""
        if self._closed:
            raise InvalidRequest("device", self, "a device that is open")
        handle = self._book.next_handle()
        return self._new_stream(name or f"stream-{handle}", handle)

    def stream_of(self, source: object) -> HostStream:
        """Return the stream meant by None, a host stream, a handle, or an object with `__cuda_stream__`."""
        # All hosts are the same machine: a stream of another one orders this one's memory just as well.
        return source if isinstance(source, HostStream) else self._book.find(source)

    def record_all(self) -> Fence:
        """Return a fence behind everything submitted to every stream, also to streams that have been forgotten."""
        with self._lock:
            lanes = list(self._lanes)
        return Joined([LaneFence(lane, lane.position) for lane in lanes])

    def fill(self, address: int, nbytes: int, value: int, stream: Stream) -> None:
        """Set bytes on the stream's thread."""
        self._submit(stream, functools.partial(bytes_at(address, nbytes).fill, value))

    def copy(self, target: int, source: int, nbytes: int, stream: Stream) -> None:
        """Copy on the stream's thread."""
        self._copy(bytes_at(target, nbytes), bytes_at(source, nbytes), stream)

    def copy_in(self, address: int, source: memoryview, stream: Stream) -> None:
        """Copy on the stream's thread; `source` is kept until then."""
        origin = bytes_of(source)
        self._copy(bytes_at(address, origin.size), origin, stream)

    def copy_out(self, target: memoryview, address: int, stream: Stream) -> None:
        """Copy on the stream's thread; `target` is kept until then."""
        goal = bytes_of(target, writable=True)
        self._copy(goal, bytes_at(address, goal.size), stream)

    def grant_access(self, peers: Sequence[Device]) -> None:
        """Do nothing for other hosts: they are the same memory.

        Raises:
            InvalidRequest: One of `peers` is another kind of device.
        """
        for peer in peers:
            _same_memory("peers", peer)

    def peer_copy(self, target: int, source: int, nbytes: int, source_device: Device, stream: Stream) -> None:
        """Copy from another host, which is a copy like any other."""
        _same_memory("source_device", source_device)
        self.copy(target, source, nbytes, stream)

    def pinned(self) -> "Host":
        """Return the host itself: its copies read and write all of its memory without a detour."""
        return self

    def close(self) -> None:
        """Take no more work and join the threads after what is queued (blocks)."""
        self._closed = True
        with self._lock:
            lanes = list(self._lanes)
        for lane in lanes:
            lane.stop()
        for lane in lanes:
            lane.join()

    def _new_stream(self, name: str, handle: int) -> HostStream:
        lane = Lane(f"asyncmem {self.name} {name}")
        with self._lock:
            self._lanes.add(lane)
        return self._book.enlist(HostStream(self, name, handle, lane))

    def _kind(self, kind: str) -> str:
        if kind == "auto":
            return self.segment_kinds[0]
        if kind not in self.segment_kinds:
            raise InvalidRequest("kind", kind, f"one of {('auto', *self.segment_kinds)}")
        return kind

    def _copy(self, target: Bytes, source: Bytes, stream: Stream) -> None:
        self._submit(stream, functools.partial(np.copyto, target, source))

    def _submit(self, stream: Stream, call: Callable[[], None]) -> None:
        self._driver_calls += 1
        self.stream_of(stream).run(call)
