"""Streams of an OpenCL device: queues that run their commands in order, its own and those of other code."""

from __future__ import annotations

import contextlib
import threading
import weakref
from typing import TYPE_CHECKING, Final

from asyncmem.devices.base import Fence, Stream
from asyncmem.devices.opencl.fence import OpenCLFence
from asyncmem.devices.streams import StreamBook
from asyncmem.errors import DeviceError, InvalidRequest

if TYPE_CHECKING:
    import pyopencl as cl

    from asyncmem.devices.opencl.device import OpenCL
    from asyncmem.devices.opencl.driver import Driver
    from asyncmem.devices.opencl.place import Place
    from asyncmem.devices.opencl.watcher import Watcher

_DEFAULT: Final = 0


class OpenCLStream(Stream):
    """A command queue. Work that was queued still runs when this object goes.

    Attributes:
        queue: For kernels: `pyopencl.CommandQueue`.
    """

    device: OpenCL

    def __init__(self, device: OpenCL, name: str, handle: int, queue: cl.CommandQueue) -> None:
        """Use `OpenCL.create_stream` or `OpenCL.stream_of` instead."""
        self.device = device
        self.name = name
        self.handle = handle
        self.queue = queue

    def __repr__(self) -> str:
        return f"<OpenCLStream {self.name!r} of {self.device.name}>"

    def record(self) -> OpenCLFence:
        """Return a fence behind everything submitted to the queue so far, by whomever."""
        return self.device.streams.record(self.queue)

    def wait(self, fence: Fence) -> None:
        """Order all later work of the queue behind a fence of this device.

        Raises:
            InvalidRequest: It is another device's: await it, or block on it, before submitting the work.
        """
        if not isinstance(fence, OpenCLFence) or fence.place is not self.device.place:
            raise InvalidRequest("fence", fence, f"a fence of {self.device.name!r}")
        driver = self.device.driver
        driver.call(driver.cl.enqueue_barrier, self.queue, wait_for=[fence.event])


class OpenCLStreams:
    """Makes and finds streams. It keeps none of them alive, but their queues until what was queued is complete."""

    def __init__(self, device: OpenCL, driver: Driver, place: Place, watcher: Watcher) -> None:
        """Know none."""
        # Where all others are waited for.
        self._meeting: cl.CommandQueue = driver.call(driver.cl.CommandQueue, place.context, place.device)
        self._device = weakref.ref(device)
        self._driver = driver
        self._place = place
        self._watcher = watcher
        self._book: StreamBook[OpenCLStream] = StreamBook(device.name)
        self._by_queue: weakref.WeakValueDictionary[int, OpenCLStream] = weakref.WeakValueDictionary()
        self._queues: dict[int, cl.CommandQueue] = {}
        self._leaving: list[OpenCLFence] = []
        # Re-entrant: a finalizer may interrupt the holder on the same thread and name a stream.
        self._lock = threading.RLock()

    def create(self, name: str | None = None, *, default: bool = False) -> OpenCLStream:
        """Make a stream with a queue of its own."""
        queue = self._driver.call(self._driver.cl.CommandQueue, self._place.context, self._place.device)
        return self._enlist(queue, name, _DEFAULT if default else self._book.next_handle())

    def find(self, source: object) -> OpenCLStream:
        """Return the stream that `source` means; see `OpenCL.stream_of`."""
        if not isinstance(source, self._driver.cl.CommandQueue):
            return self._book.find(source)
        with self._lock:
            return self._by_queue.get(source.int_ptr) or self._adopt(source)

    def record(self, queue: cl.CommandQueue, *, behind: list[cl.Event] | None = None) -> OpenCLFence:
        """Return a fence behind everything in a queue so far, and behind these events."""
        event = self._driver.call(self._driver.cl.enqueue_marker, queue, wait_for=behind)
        # Others may wait for the event, which counts only once it is on its way.
        self._driver.call(queue.flush)
        return OpenCLFence(self._driver, self._place, self._watcher, event)

    def record_all(self) -> OpenCLFence:
        """Return a fence behind everything in all queues so far, those of streams that are gone too."""
        with self._lock:
            self._forget_who_is_gone()
            leaving, queues = list(self._leaving), list(self._queues.values())
        each = [*leaving, *(self.record(queue) for queue in queues)]
        return self.record(self._meeting, behind=[fence.event for fence in each])

    def _adopt(self, queue: cl.CommandQueue) -> OpenCLStream:
        out_of_order = self._driver.cl.command_queue_properties.OUT_OF_ORDER_EXEC_MODE_ENABLE
        if queue.context != self._place.context or queue.device != self._place.device:
            raise InvalidRequest("stream", queue, f"a queue in the context of {self._driver.device!r}")
        if queue.properties & out_of_order:
            raise InvalidRequest("stream", queue, "a queue that runs its commands in order")
        return self._enlist(queue, None, self._book.next_handle())

    def _enlist(self, queue: cl.CommandQueue, name: str | None, handle: int) -> OpenCLStream:
        device = self._device()
        assert device is not None
        stream = OpenCLStream(device, name or f"stream-{handle}", handle, queue)
        with self._lock:
            self._queues[handle] = queue
            self._by_queue[queue.int_ptr] = self._book.enlist(stream)
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
