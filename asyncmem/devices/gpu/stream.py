"""Streams of a GPU: its own, and those of other libraries as they come."""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING, Final

from asyncmem.devices.base import Fence, Stream
from asyncmem.devices.gpu.driver import INVALID_HANDLE
from asyncmem.devices.gpu.fence import GpuFence
from asyncmem.devices.streams import offered_handle
from asyncmem.errors import DeviceError, InvalidRequest

if TYPE_CHECKING:
    from asyncmem.devices.gpu._calls import Context
    from asyncmem.devices.gpu.device import Gpu

LEGACY: Final = (0, 1)
"""Handles that mean the legacy default stream. A driver may not take both, so it gets the one that it takes."""
PER_THREAD: Final = 2

# Handles are addresses of what the driver keeps of a stream; it follows whatever it is given, also into nowhere.
_LOWEST_HANDLE: Final = 1 << 16
_HANDLE_ALIGNMENT: Final = 8


class GpuStream(Stream):
    """A stream of the driver's. One that the device made is destroyed with this object, after its work.

    One `of_one_thread` is that thread's default stream, for programs that are built to have one in each. Its handle
    means another stream in every thread, so in others it can be named only together with all streams.
    """

    device: Gpu

    def __init__(self, device: Gpu, name: str, handle: int, *, lasting: bool = True, keeps: object = None) -> None:
        """Use the device's `create_stream` or `stream_of` instead."""
        super().__init__(device, name, handle)
        self.of_one_thread = handle == PER_THREAD
        self.lasting = lasting
        self.native = lasting and not self.of_one_thread
        self.keeps = keeps

    def __repr__(self) -> str:
        return f"<{type(self.device).__name__}Stream {self.name!r} of {self.device.name}>"

    def __cuda_stream__(self) -> tuple[int, int]:
        """Offer the handle to other libraries, which must keep this object while they use it."""
        return (0, self.handle)

    def record(self) -> GpuFence:
        """Return a fence behind everything submitted here so far, by whichever library.

        The default stream of one thread, asked on another: a fence behind all streams' work.
        """
        if self.is_another_threads():
            return self.device.record_all()
        return GpuFence(self.device, self.device.context.record(self.handle))

    def wait(self, fence: Fence) -> None:
        """Order all later work of this stream behind a fence of this or another device of the vendor's.

        The default stream of one thread, asked on another: that of all streams that are not non-blocking.

        Raises:
            InvalidRequest: It is no such fence: await it, or block on it, before submitting the work.
        """
        if not isinstance(fence, GpuFence) or fence.device.interface is not self.device.interface:
            expected = f"a fence of {self.device.name!r} or another {self.device.interface.name} device"
            raise InvalidRequest("fence", fence, expected)
        # Work on the legacy default stream holds up later work of all blocking streams, of which a thread's is one.
        handle = self.device.default_stream.handle if self.is_another_threads() else self.handle
        self.device.context.wait(handle, fence.native)

    def capturing(self) -> bool:
        """Return whether a graph is captured here; of another thread's default stream that cannot be seen: no."""
        return not self.is_another_threads() and self.device.context.capturing(self.handle)

    def for_any_thread(self) -> Stream:
        """Return this stream, or a new one behind it where its handle means another elsewhere."""
        if not self.of_one_thread:
            return self
        stream: Stream = self.device.create_stream(f"behind the {self.name}")
        stream.wait(self.record())
        return stream

    def is_another_threads(self) -> bool:
        """Return whether it is the default stream of a thread, and not of the calling one."""
        return self.of_one_thread and not self.device.streams.is_this_threads(self)

    def keep(self, source: object) -> None:
        """Hold what owns a stream that was known by its bare handle until now."""
        self.keeps = source
        self.lasting = self.native = True


class GpuStreams:
    """Finds the object for a stream. It keeps no stream alive.

    Streams are told apart by the number that the driver gives each once: a handle is soon used again. To ask for it
    ends a capture, so a stream that is being captured is known by its handle, if it is kept alive, or by its handle and
    the number of the capture: for that long it has it to itself.
    """

    def __init__(self, device: Gpu, context: Context) -> None:
        """Begin with the default stream."""
        self._device = device
        self._context = context
        self._known: weakref.WeakValueDictionary[int | tuple[int, int], GpuStream] = weakref.WeakValueDictionary()
        self._kept: weakref.WeakValueDictionary[int, GpuStream] = weakref.WeakValueDictionary()  # by their handles
        self._by_source: weakref.WeakValueDictionary[int, GpuStream] = weakref.WeakValueDictionary()
        self._here = threading.local()
        # Re-entrant: a finalizer may interrupt the holder on the same thread and name a stream.
        self._lock = threading.RLock()

    def create(self, name: str | None) -> GpuStream:
        """Make a stream that no other waits for by itself."""
        handle = self._context.create_stream()
        try:
            number = self._context.stream_id(handle)
        except BaseException:
            self._context.destroy_stream(handle)
            raise
        stream = GpuStream(self._device, name or f"stream-{number}", handle)
        # Not at exit: the driver may have gone before us.
        weakref.finalize(stream, self._context.destroy_stream, handle).atexit = False
        with self._lock:
            self._known[number] = self._kept[handle] = stream
        return stream

    def find(self, source: object) -> GpuStream:
        """Return the stream that `source` means; see `Gpu.stream_of`."""
        device = self._device
        if source is None:
            return device.default_stream
        if type(source) is not int:
            if isinstance(source, GpuStream) and source.device is device:
                return source
            known = self._by_source.get(id(source))
            if known is not None and known.keeps is source:
                return known  # it has not died since, so neither has its stream
            self._check_device(source)
        bare = isinstance(source, int) and not isinstance(source, bool)
        handle = source if isinstance(source, int) and bare else _offered(source)
        if handle in LEGACY:
            return device.default_stream
        if handle == PER_THREAD:
            return self._this_threads()
        if not _LOWEST_HANDLE <= handle < 1 << 64 or handle % _HANDLE_ALIGNMENT:
            raise self._no_stream(source)
        return self._by_handle(handle, source, bare=bare)

    def is_this_threads(self, stream: Stream) -> bool:
        """Return whether it is the default stream of the calling thread."""
        return getattr(self._here, "stream", None) is stream

    def _check_device(self, source: object) -> None:
        device = self._device
        # Default streams have the same handles on every device, so the object must say which is meant, if it can.
        if isinstance(source, GpuStream):
            same = source.device.name == device.name
        else:
            numbers = [getattr(source, name, None) for name in ("device_index", "device_id")]  # torch's, CuPy's
            same = not isinstance(source, Stream) and {device.index, -1, None}.issuperset(numbers)
        if not same:
            raise InvalidRequest("stream", source, f"a stream of device {device.name!r}")

    def _this_threads(self) -> GpuStream:
        stream: GpuStream | None = getattr(self._here, "stream", None)
        if stream is None:
            name = f"default of {threading.current_thread().name!r}"
            stream = self._here.stream = GpuStream(self._device, name, PER_THREAD)
        return stream

    def _by_handle(self, handle: int, source: object, *, bare: bool) -> GpuStream:
        capture, number = self._numbers(handle, source)
        key = (handle, capture) if capture else number
        with self._lock:
            stream = (self._kept.get(handle) if capture else None) or self._known.get(key)
            added = not bare and (stream is None or not stream.lasting)
            if stream is None:
                self._check_context(handle, source)
                name = f"stream of capture {capture}" if capture else f"stream-{number}"
                stream = GpuStream(self._device, name, handle, lasting=not bare, keeps=None if bare else source)
                self._known[key] = stream
            elif added:
                stream.keep(source)
            if not bare and stream.keeps is source:
                self._by_source[id(source)] = stream
            if added:
                self._kept[handle] = stream
        if added:
            self._context.add_stream(handle)
            weakref.finalize(stream, self._context.remove_stream, handle).atexit = False
        return stream

    def _numbers(self, handle: int, source: object) -> tuple[int, int]:
        """Return the number of a capture, or 0 and the stream's own."""
        try:
            capture = self._context.capture_of(handle)
            return capture, 0 if capture else self._context.stream_id(handle)
        except DeviceError as error:
            if error.code != INVALID_HANDLE:
                raise
            raise self._no_stream(source) from None

    def _no_stream(self, source: object) -> InvalidRequest:
        return InvalidRequest("stream", source, f"the handle of a live {self._device.interface.name} stream")

    def _check_context(self, handle: int, source: object) -> None:
        with self._context.entered():
            other = self._context.stream_context(handle)
        if other != self._context.handle:
            raise InvalidRequest("stream", source, f"a stream of device {self._device.name!r}, in its primary context")


def _offered(source: object) -> int:
    """Return the handle that an object of another library offers."""
    if not hasattr(source, "__cuda_stream__"):
        # torch, CuPy and numba from before that protocol; numba's is a ctypes pointer, which is None for 0.
        for name in ("cuda_stream", "ptr", "handle"):
            found: object = getattr(source, name, source)
            if found is not source:
                value = getattr(found, "value", found)
                if value is None or isinstance(value, int):
                    return value or 0
    return offered_handle(source)
