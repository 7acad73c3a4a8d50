"""Fences that are asked: what follows from being able to ask, for drivers that are better not asked to call back."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from asyncmem.devices.awaiting import wait_until_done
from asyncmem.devices.base import Fence
from asyncmem.devices.watcher import pause_after
from asyncmem.errors import DeviceError

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from asyncmem.devices.watcher import Watcher


class PolledFence(Fence):
    """A fence that says how to ask: `done`. A thread of the device's asks for those who wait."""

    def __init__(self, watcher: Watcher) -> None:
        """Wait by this watcher."""
        self._watcher = watcher

    def block(self, timeout: float | None = None) -> bool:
        """Wait on this thread (**blocks**); signals are heard.

        Raises:
            DeviceError: As `done`.
        """
        return self.outlast(timeout) and self.done()

    def outlast(self, timeout: float | None = None) -> bool:
        """Wait on this thread until there is nothing left to wait for (**blocks**), without raising."""
        began = time.perf_counter()
        while not self.over():
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

    def __await__(self) -> Generator[object, object, None]:
        """Wait on asyncio, uvloop or trio. Cancelling changes nothing on the device and leaves nothing behind.

        Raises:
            DeviceError: As `done`.
        """
        yield from wait_until_done(self)
        self.done()

    def over(self) -> bool:
        """Tell whether there is nothing left to wait for: the point is reached, or never will be."""
        try:
            return self.done()
        except DeviceError:
            return True
