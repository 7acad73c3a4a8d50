"""Fences of an OpenCL device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from asyncmem.devices.polled import PolledFence

if TYPE_CHECKING:
    import pyopencl as cl

    from asyncmem.devices.opencl.driver import Driver
    from asyncmem.devices.opencl.place import Place
    from asyncmem.devices.watcher import Watcher

_COMPLETE: Final = 0


class OpenCLFence(PolledFence):
    """The event of a marker in a queue.

    Attributes:
        event: For other libraries: `pyopencl.Event`.
    """

    def __init__(self, driver: Driver, place: Place, watcher: Watcher, event: cl.Event) -> None:
        """Use `OpenCLStream.record` instead."""
        super().__init__(watcher)
        self.event = event
        self.place = place
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
