"""Fences of a CUDA device, and what watches them: one for the device's threads, whoever waits."""

from __future__ import annotations

from typing import TYPE_CHECKING

from asyncmem.devices.base import Fence
from asyncmem.devices.cuda.waits import wait
from asyncmem.errors import DeviceError

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from asyncmem.devices.cuda import _calls
    from asyncmem.devices.cuda.device import Cuda


class CudaFence(Fence):
    """A CUDA event, recorded once. It keeps the device's context; the event serves the next fence afterwards."""

    def __init__(self, device: Cuda, native: _calls.Fence) -> None:
        """Use `CudaStream.record` instead."""
        self.device = device
        self.native = native
        self._tokens: list[tuple[Callable[[], None], int]] = []

    def __repr__(self) -> str:
        return f"<CudaFence of {self.device.name}>"

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
        else:
            self._tokens.append((callback, self.device.notices.add(self.native, callback)))

    def forget(self, callback: Callable[[], None]) -> None:
        """Drop a callback that has not run."""
        for entry in self._tokens:
            if entry[0] == callback:
                self._tokens.remove(entry)
                self.device.notices.drop(entry[1])
                return

    def __await__(self) -> Generator[object, object, None]:
        """Wait on asyncio, uvloop or trio. Cancelling changes nothing on the device and leaves nothing behind.

        Raises:
            DeviceError: The device is lost.
        """
        return wait(self)
