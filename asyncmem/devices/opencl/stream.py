"""Streams and fences of an OpenCL device: command queues, its own and those of other code, and their events."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from asyncmem.devices.base import Fence
from asyncmem.devices.fences import PolledFence
from asyncmem.devices.opencl.driver import failure
from asyncmem.devices.streams import QueueStream, WorkQueue
from asyncmem.errors import InvalidRequest

if TYPE_CHECKING:
    import pyopencl as cl

    from asyncmem.devices.fences import FencePoller
    from asyncmem.devices.opencl.device import OpenCL
    from asyncmem.devices.opencl.driver import Driver, PhysicalDevice

_COMPLETE: Final = 0


class Commands(WorkQueue["OpenCLFence"]):
    """A queue, of the device or of other code."""

    def __init__(self, driver: Driver, physical: PhysicalDevice, poller: FencePoller, queue: cl.CommandQueue) -> None:
        """Take a queue that runs its commands in order."""
        self.driver = driver
        self.physical = physical
        self.poller = poller
        self.queue = queue
        self.key = queue.int_ptr

    def record(self, *, behind: list[cl.Event] | None = None) -> OpenCLFence:
        """Return a fence behind everything in the queue so far, and behind these events."""
        event = self.driver.call(self.driver.cl.enqueue_marker, self.queue, wait_for=behind)
        # Others may wait for the event, which counts only once it is on its way.
        self.driver.call(self.queue.flush)
        return OpenCLFence(self, event)


class OpenCLFence(PolledFence):
    """The event of a marker in a queue.

    Attributes:
        event: For other libraries: `pyopencl.Event`.
    """

    def __init__(self, commands: Commands, event: cl.Event) -> None:
        """Use `OpenCLStream.record` instead."""
        super().__init__(commands.poller)
        self.event = event
        self.physical = commands.physical
        self._driver = commands.driver
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
                raise failure("clGetEventInfo", status, self._driver.device)
            if status == _COMPLETE:
                # Asking makes nothing visible to others, by the standard; waiting does, and is over at once.
                self._driver.call(self.event.wait)
                self._reached = True
        return self._reached


class OpenCLStream(QueueStream[OpenCLFence]):
    """A command queue. Work that was queued still runs when this object goes."""

    device: OpenCL
    work: Commands

    @property
    def queue(self) -> cl.CommandQueue:
        """For kernels: `pyopencl.CommandQueue`."""
        return self.work.queue

    def wait(self, fence: Fence) -> None:
        """Order all later work of the queue behind a fence of this device.

        Raises:
            InvalidRequest: It is another device's: await it, or block on it, before submitting the work.
        """
        if not isinstance(fence, OpenCLFence) or fence.physical is not self.device.physical:
            raise InvalidRequest("fence", fence, f"a fence of {self.device.name!r}")
        driver = self.device.driver
        driver.call(driver.cl.enqueue_barrier, self.queue, wait_for=[fence.event])
