"""Streams of an OpenCL device: queues that run their commands in order, its own and those of other code."""

from __future__ import annotations

import weakref
from functools import partial
from typing import TYPE_CHECKING

from asyncmem.devices.base import Fence, Stream
from asyncmem.devices.opencl.fence import OpenCLFence
from asyncmem.devices.queues import QueueStreams
from asyncmem.errors import InvalidRequest

if TYPE_CHECKING:
    import pyopencl as cl

    from asyncmem.devices.opencl.device import OpenCL
    from asyncmem.devices.opencl.driver import Driver
    from asyncmem.devices.opencl.place import Place
    from asyncmem.devices.watcher import Watcher


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


class OpenCLStreams(QueueStreams["OpenCLStream", "cl.CommandQueue", OpenCLFence]):
    """Makes and finds streams."""

    def __init__(self, device: OpenCL, driver: Driver, place: Place, watcher: Watcher) -> None:
        """Know none."""
        super().__init__(device.name)
        # Where all others are waited for.
        self._meeting: cl.CommandQueue = driver.call(driver.cl.CommandQueue, place.context, place.device)
        self._device = weakref.ref(device)
        self._driver = driver
        self._place = place
        self._watcher = watcher

    def find(self, source: object) -> OpenCLStream:
        """Return the stream that `source` means; see `OpenCL.stream_of`."""
        if not isinstance(source, self._driver.cl.CommandQueue):
            return self.book.find(source)
        return self.adopt(source.int_ptr, partial(self._checked, source))

    def record(self, queue: cl.CommandQueue, *, behind: list[cl.Event] | None = None) -> OpenCLFence:
        """Return a fence behind everything in a queue so far, and behind these events."""
        event = self._driver.call(self._driver.cl.enqueue_marker, queue, wait_for=behind)
        # Others may wait for the event, which counts only once it is on its way.
        self._driver.call(queue.flush)
        return OpenCLFence(self._driver, self._place, self._watcher, event)

    def record_all(self) -> OpenCLFence:
        """Return a fence behind everything in all queues so far, those of streams that are gone too."""
        return self.record(self._meeting, behind=[fence.event for fence in self.record_each()])

    def new_queue(self) -> cl.CommandQueue:
        """Make a queue that runs its commands in order."""
        queue: cl.CommandQueue = self._driver.call(
            self._driver.cl.CommandQueue, self._place.context, self._place.device
        )
        return queue

    def key_of(self, queue: cl.CommandQueue) -> int:
        """Return the address of the driver's object."""
        return int(queue.int_ptr)

    def stream_over(self, queue: cl.CommandQueue, name: str, handle: int) -> OpenCLStream:
        """Make the stream that stands for a queue."""
        device = self._device()
        assert device is not None
        return OpenCLStream(device, name, handle, queue)

    def _checked(self, queue: cl.CommandQueue) -> cl.CommandQueue:
        out_of_order = self._driver.cl.command_queue_properties.OUT_OF_ORDER_EXEC_MODE_ENABLE
        if queue.context != self._place.context or queue.device != self._place.device:
            raise InvalidRequest("stream", queue, f"a queue in the context of {self._driver.device!r}")
        if queue.properties & out_of_order:
            raise InvalidRequest("stream", queue, "a queue that runs its commands in order")
        return queue
