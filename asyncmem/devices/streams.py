"""Streams and the queues behind them: finding a stream by what means it, and what streams that are gone have left."""

from __future__ import annotations

import contextlib
import itertools
import threading
import weakref
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

from asyncmem.devices.base import Fence, Stream
from asyncmem.errors import DeviceError, InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from asyncmem.devices.base import Device
    from asyncmem.devices.fences import FenceThread

S = TypeVar("S", bound=Stream)
F = TypeVar("F", bound=Fence)

# 1 and 2 name the legacy and the per-thread default stream in CUDA, so a simulated handle must be neither.
_FIRST_HANDLE: Final = 16
_DEFAULT: Final = 0


class StreamBook(Generic[S]):
    """Handles out handles and finds streams again. It keeps no stream alive."""

    def __init__(self, device: str, handles: Iterator[int] | None = None) -> None:
        """Serve the device of that name; `handles` are shared by devices whose streams must not be mixed up."""
        self._device = device
        self.handles = itertools.count(_FIRST_HANDLE) if handles is None else handles
        self._streams: weakref.WeakValueDictionary[int, S] = weakref.WeakValueDictionary()
        # Re-entrant: a finalizer may interrupt the holder on the same thread and name a stream.
        self._lock = threading.RLock()

    def next_handle(self) -> int:
        """Return a handle that no stream of this device has had: a reused one would name the wrong stream."""
        return next(self.handles)

    def enlist(self, stream: S) -> S:
        """Make a stream findable by its handle for as long as it lives."""
        with self._lock:
            self._streams[stream.handle] = stream
        return stream

    def alive(self) -> list[S]:
        """Return the live streams, in the order of their handles."""
        with self._lock:
            return [stream for _, stream in sorted(self._streams.items())]

    def find(self, source: object) -> S:
        """Return the stream that `source` means.

        Args:
            source: None for the default stream, a stream, its handle, or an object with `__cuda_stream__`.

        Raises:
            InvalidRequest: It is something else, of another device, or gone.
        """
        handle = _handle_of(source)
        with self._lock:
            stream = self._streams.get(handle)
        if stream is None or (isinstance(source, Stream) and stream is not source):
            what = "a stream" if isinstance(source, Stream) else "the handle of a live stream"
            raise InvalidRequest("stream", source, f"{what} of device {self._device!r}")
        return stream


def _handle_of(source: object) -> int:
    if source is None:
        return _DEFAULT
    if isinstance(source, Stream):
        return source.handle
    return source if isinstance(source, int) and not isinstance(source, bool) else offered_handle(source)


def offered_handle(source: object) -> int:
    """Return the handle that an object offers by `__cuda_stream__`.

    Raises:
        InvalidRequest: It offers none.
    """
    offer = getattr(source, "__cuda_stream__", None)
    answer = offer() if callable(offer) and not isinstance(source, type) else None
    match answer:
        case (0, int(handle)):
            return handle
    raise InvalidRequest("stream", source, "None, a stream, its handle, or an object with __cuda_stream__()")


class WorkQueue(Generic[F]):
    """A queue whose work is done in order. It knows no stream, so that a forgotten one can be collected."""

    key: int
    """A number that no other queue of the device has."""

    def record(self) -> F:
        """Return a fence behind everything in the queue so far, of any library."""
        raise NotImplementedError

    @property
    def thread(self) -> FenceThread | None:
        """The thread that does the work, if it is one of ours."""
        return None


class QueueStream(Stream, Generic[F]):
    """A stream over a queue. Work that was queued still runs when this object goes.

    Attributes:
        work: The queue.
    """

    def __init__(self, device: Device, name: str, handle: int, work: WorkQueue[F]) -> None:
        """Use the device's `create_stream` or `stream_of` instead."""
        super().__init__(device, name, handle)
        self.work = work

    def record(self) -> F:
        """Return a fence behind everything submitted here so far, by any library."""
        return self.work.record()


Q = TypeVar("Q", bound=QueueStream[Any])


class QueueBook(StreamBook[Q], Generic[Q, F]):
    """Streams over queues. It keeps no stream alive, but their queues until what was queued is complete."""

    def __init__(self, device: str) -> None:
        """Serve the device of that name, and know no stream."""
        super().__init__(device)
        self._by_key: weakref.WeakValueDictionary[int, Q] = weakref.WeakValueDictionary()
        self._queues: dict[int, WorkQueue[F]] = {}
        self._leaving: list[F] = []
        self._threads: weakref.WeakSet[FenceThread] = weakref.WeakSet()  # a running one is kept by itself

    def enlist(self, stream: Q) -> Q:
        """Make a stream findable by its handle and its queue for as long as it lives."""
        with self._lock:
            self._queues[stream.handle] = stream.work
            if stream.work.thread is not None:
                self._threads.add(stream.work.thread)
            self._by_key[stream.work.key] = super().enlist(stream)
        # Not at exit: the driver may have gone before us, and the threads are daemons.
        weakref.finalize(stream, self._keep_last_fence, stream.handle).atexit = False
        return stream

    def adopt(self, key: int, make: Callable[[], Q]) -> Q:
        """Return the stream that stands for the queue of that number, and make it if there is none yet."""
        with self._lock:
            return self._by_key.get(key) or make()

    def record_each(self) -> list[F]:
        """Return fences that are together behind everything so far, in the queues of streams that are gone too."""
        with self._lock:
            self._drop_ended()
            leaving, queues = list(self._leaving), list(self._queues.values())
        return [*leaving, *(queue.record() for queue in queues)]

    def end(self) -> None:
        """End the threads of all queues, those of streams that are gone too (blocks)."""
        with self._lock:
            threads = list(self._threads)
        for thread in threads:
            thread.stop()
        for thread in threads:
            thread.join()

    def _keep_last_fence(self, handle: int) -> None:
        """Remember what a stream that is gone has left in its queue."""
        with self._lock:
            queue = self._queues[handle]
            self._drop_ended()
            with contextlib.suppress(DeviceError):  # a lost device runs nothing any more
                self._leaving.append(queue.record())
            del self._queues[handle]
        if queue.thread is not None:
            queue.thread.stop()

    def _drop_ended(self) -> None:
        for fence in list(self._leaving):
            # Asking may run a finalizer, which comes here too.
            if fence.over() and fence in self._leaving:
                self._leaving.remove(fence)
