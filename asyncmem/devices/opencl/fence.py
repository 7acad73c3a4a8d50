"""Fences of an OpenCL device."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

from asyncmem.devices.base import Fence
from asyncmem.devices.opencl.watcher import Watcher, pause_after
from asyncmem.errors import DeviceError

if TYPE_CHECKING:
    from collections.abc import Callable

    import pyopencl as cl

    from asyncmem.devices.opencl.driver import Driver
    from asyncmem.devices.opencl.place import Place

_COMPLETE: Final = 0


class OpenCLFence(Fence):
    """The event of a marker in a queue.

    Attributes:
        event: For other libraries: `pyopencl.Event`.
    """

    def __init__(self, driver: Driver, place: Place, watcher: Watcher, event: cl.Event) -> None:
        """Use `OpenCLStream.record` instead."""
        self.event = event
        self.place = place
        self._driver = driver
        self._watcher = watcher
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

    def block(self, timeout: float | None = None) -> bool:
        """Wait on this thread (**blocks**); signals are heard.

        Raises:
            DeviceError: As `done`.
        """
        began = time.perf_counter()
        while not self.done():
            waited = time.perf_counter() - began
            if timeout is not None and waited >= timeout:
                return False
            pause = pause_after(waited)
            time.sleep(pause if timeout is None else min(pause, timeout - waited))
        return True

    def notify(self, callback: Callable[[], None]) -> None:
        """Call back once, now or on the device's thread, also where work has failed: ask `done()` which it was."""
        if self.over():
            callback()
        else:
            self._watcher.add(self, callback)

    def forget(self, callback: Callable[[], None]) -> None:
        """Drop a callback that has not run."""
        self._watcher.drop(self, callback)

    def over(self) -> bool:
        """Tell whether there is nothing left to wait for: the point is reached, or never will be."""
        try:
            return self.done()
        except DeviceError:
            return True
