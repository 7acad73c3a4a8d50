"""Streams and fences of an OpenCL device: command queues, its own and those of other code, and their events."""

from __future__ import annotations

import weakref
from functools import partial
from typing import TYPE_CHECKING, Final

from asyncmem.devices.base import Fence, Stream
from asyncmem.devices.fences import PolledFence
from asyncmem.devices.queue_device import QueueStreams
from asyncmem.errors import InvalidRequest

if TYPE_CHECKING:
    import pyopencl as cl

    from asyncmem.devices.fences import FencePoller
    from asyncmem.devices.opencl.device import OpenCL
    from asyncmem.devices.opencl.driver import Driver, PhysicalDevice

_COMPLETE: Final = 0


class OpenCLFence(PolledFence):
    """The event of a marker in a queue.

    Attributes:
        event: For other libraries: `pyopencl.Event`.
    """

    def __init__(self, driver: Driver, physical: PhysicalDevice, poller: FencePoller, event: cl.Event) -> None:
        """Use `OpenCLStream.record` instead."""
        super().__init__(poller)
        self.event = event
        self.physical = physical
        self._driver = driver
        self._reached = False

    def __repr__(self) -> str:
        return f"<OpenCLFence of {self._driver.device}>"

    def done(self) -> bool:
        """Ask the driver whether the queue has come this far.

        Raises:
            DeviceError: Work before the fence has failed, or the device is lost.
        """
        if not self._reached:
            status = int(self._driver.call(getattr, self.event, "command_execution_status"))
            if status < _COMPLETE:
                raise self._driver.failure("clGetEventInfo", status)
            if status == _COMPLETE:
                # Asking makes nothing visible to others, by the standard; waiting does, and is over at once.
                self._driver.call(self.event.wait)
                self._reached = True
        return self._reached


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
        """Return a fence behind everything submitted to the queue so far, by any library."""
        return self.device.streams.record(self.queue)

    def wait(self, fence: Fence) -> None:
        """Order all later work of the queue behind a fence of this device.

        Raises:
            InvalidRequest: It is another device's: await it, or block on it, before submitting the work.
        """
        if not isinstance(fence, OpenCLFence) or fence.physical is not self.device.physical:
            raise InvalidRequest("fence", fence, f"a fence of {self.device.name!r}")
        driver = self.device.driver
        driver.call(driver.cl.enqueue_barrier, self.queue, wait_for=[fence.event])


class OpenCLStreams(QueueStreams["OpenCLStream", "cl.CommandQueue", OpenCLFence]):
    """Makes and finds streams."""

    def __init__(self, device: OpenCL, driver: Driver, physical: PhysicalDevice, poller: FencePoller) -> None:
        """Know none."""
        super().__init__(device.name)
        # Where all others are waited for.
        self._meeting: cl.CommandQueue = driver.call(driver.cl.CommandQueue, physical.context, physical.device)
        self._device = weakref.ref(device)
        self._driver = driver
        self._physical = physical
        self._poller = poller

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
        return OpenCLFence(self._driver, self._physical, self._poller, event)

    def record_all(self) -> OpenCLFence:
        """Return a fence behind everything in all queues so far, those of streams that are gone too."""
        return self.record(self._meeting, behind=[fence.event for fence in self.record_each()])

    def new_queue(self) -> cl.CommandQueue:
        """Make a queue that runs its commands in order."""
        queue: cl.CommandQueue = self._driver.call(
            self._driver.cl.CommandQueue, self._physical.context, self._physical.device
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
        if queue.context != self._physical.context or queue.device != self._physical.device:
            raise InvalidRequest("stream", queue, f"a queue in the context of {self._driver.device!r}")
        if queue.properties & out_of_order:
            raise InvalidRequest("stream", queue, "a queue that runs its commands in order")
        return queue
