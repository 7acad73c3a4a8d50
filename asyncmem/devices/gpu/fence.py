"""Fences of a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

from asyncmem.devices.base import Fence
from asyncmem.devices.gpu.waits import wait
from asyncmem.errors import DeviceError

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from asyncmem.devices.gpu import _calls
    from asyncmem.devices.gpu.device import AnyGpu


class GpuFence(Fence):
    """An event of the driver's, recorded once. It keeps the context; the event serves the next fence afterwards."""

    device: AnyGpu

    def __init__(self, device: AnyGpu, native: _calls.Fence) -> None:
        """Use a stream's `record` instead."""
        self.device = device
        self.native = native
        self._waiting: dict[object, tuple[Callable[[], None], int]] = {}

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self.device.name}>"

    def done(self) -> bool:
        """Ask the driver whether the device has come this far.

        Raises:
            DeviceError: The device is lost, and with it the work before the fence.
        """
        return self.native.done()

    def block(self, timeout: float | None = None) -> bool:
        """Wait on this thread (**blocks**), without the interpreter's lock; signals are heard.

        Raises:
            DeviceError: The device is lost.
        """
        return self.native.block(-1 if timeout is None else max(0, int(timeout * 1e6)))

    def notify(self, callback: Callable[[], None]) -> None:
        """Call back once, now or on the device's thread, also when the device is lost: ask `done()` which it was."""
        try:
            reached = self.done()
        except DeviceError:
            reached = True
        if reached:
            callback()
            return
        key, waiting = object(), self._waiting
        over = False

        def tell() -> None:
            # Kept any longer, a callback that knows its fence would keep it for the collector.
            nonlocal over
            over = True
            waiting.pop(key, None)
            callback()

        token = self.device.notices.add(self.native, tell)
        waiting[key] = callback, token
        if over:
            waiting.pop(key, None)

    def forget(self, callback: Callable[[], None]) -> None:
        """Drop a callback that has not run."""
        for key, (known, token) in list(self._waiting.items()):
            if known == callback and self._waiting.pop(key, None) is not None:
                self.device.notices.drop(token)
                return

    def __await__(self) -> Generator[object, object, None]:
        """Wait on asyncio, uvloop or trio. Cancelling changes nothing on the device and leaves nothing behind.

        Raises:
            DeviceError: The device is lost.
        """
        return wait(self)
