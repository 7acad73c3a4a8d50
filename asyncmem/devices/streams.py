"""The streams of one device by their handles, and what a caller may write to mean one of them."""

import itertools
import threading
import weakref
from collections.abc import Iterator
from typing import Generic, TypeVar

from asyncmem.devices.base import Stream
from asyncmem.errors import InvalidRequest

S = TypeVar("S", bound=Stream)

# 1 and 2 name the legacy and the per-thread default stream in CUDA, so a simulated handle must be neither.
_FIRST_HANDLE = 16


class StreamBook(Generic[S]):
    """Handles out handles and finds streams again. It keeps no stream alive."""

    def __init__(self, device: str, handles: Iterator[int] | None = None) -> None:
        """Serve the device of that name; `handles` are shared by devices whose streams must not be mixed up."""
        self._device = device
        self.handles = itertools.count(_FIRST_HANDLE) if handles is None else handles
        self._streams: weakref.WeakValueDictionary[int, S] = weakref.WeakValueDictionary()
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
        if source is None:
            return self._by_handle(0, source)
        if isinstance(source, Stream):
            return self._own(source)
        if isinstance(source, int) and not isinstance(source, bool):
            return self._by_handle(source, source)
        return self._by_handle(self._foreign_handle(source), source)

    def _own(self, stream: Stream) -> S:
        with self._lock:
            own = self._streams.get(stream.handle)
        if own is stream:
            return own
        raise InvalidRequest("stream", stream, f"a stream of device {self._device!r}")

    def _by_handle(self, handle: int, source: object) -> S:
        with self._lock:
            stream = self._streams.get(handle)
        if stream is None:
            raise InvalidRequest("stream", source, f"the handle of a live stream of device {self._device!r}")
        return stream

    def _foreign_handle(self, source: object) -> int:
        offer = getattr(source, "__cuda_stream__", None)
        answer = offer() if callable(offer) else None
        match answer:
            case (0, int(handle)):
                return handle
        raise InvalidRequest("stream", source, "None, a stream, its handle, or an object with __cuda_stream__()")
