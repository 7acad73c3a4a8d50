"""Fences of a GPU: calling back from them on a thread of the device's, and awaiting them on an event loop.

A loop has one descriptor, which the native side makes readable. One wake-up is for any number of fences, and no thread
takes the interpreter's lock for it. A wait that was cancelled is forgotten on both sides, and what is meant for a loop
that is gone stays unread.
"""

from __future__ import annotations

import asyncio
import itertools
import select
import threading
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING

from asyncmem.devices.awaiting import call_all, in_trio, sleeper_here
from asyncmem.devices.fences import FenceThread, ThreadedFence

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from trio.lowlevel import RunVar

    from asyncmem.devices.base import Fence
    from asyncmem.devices.gpu import _calls
    from asyncmem.devices.gpu._calls import Sink, Watcher
    from asyncmem.devices.gpu.device import Gpu


@dataclass(slots=True, eq=False)
class _Wait:
    fence: _calls.Fence
    callback: Callable[[], object]
    code: int = 0
    """The driver's, where the fence will never be reached."""


class Notices:
    """The callbacks for the fences that a sink is notified of."""

    def __init__(self, sink: Sink) -> None:
        """Read from `sink`, once its descriptor is readable."""
        self.sink = sink
        self.numbers = itertools.count()
        self.waits: dict[int, _Wait] = {}

    def drop(self, watcher: Watcher, number: int) -> None:
        """Forget a callback, if it has not run."""
        if self.waits.pop(number, None) is not None:
            watcher.forget(self.sink, number)

    def read(self) -> None:
        """Call back for the fences that are reached, or never will be."""
        call_all(self._take())

    def _take(self) -> list[Callable[[], object]]:
        due = []
        for number, code in self.sink.take():
            wait = self.waits.pop(number, None)
            if wait is not None:
                wait.code = code
                due.append(wait.callback)
        return due


class FenceCallbacks(FenceThread):
    """Callbacks by fence, on a thread."""

    def __init__(self, name: str, sink: Sink, watcher: Watcher) -> None:
        """Name the thread; it does not start yet."""
        super().__init__(name)
        self._notices = Notices(sink)
        self._watcher = watcher

    def notify(self, fence: Fence, callback: Callable[[], None]) -> None:
        """Call back once: now, or when the fence is reached or never will be."""
        assert isinstance(fence, GpuFence)
        if fence.over():
            callback()
            return
        notices, native = self._notices, fence.native
        with self._lock:
            number = next(notices.numbers)
            notices.waits[number] = _Wait(native, callback)
            self._start()
        try:
            self._watcher.watch(native, notices.sink, number)
        except BaseException:
            notices.waits.pop(number, None)
            raise

    def forget(self, fence: Fence, callback: Callable[[], None]) -> None:
        """Drop a callback that has not run, once."""
        assert isinstance(fence, GpuFence)
        for number, wait in list(self._notices.waits.items()):
            if wait.fence is fence.native and wait.callback == callback:
                self._notices.drop(self._watcher, number)
                if self._stopped:
                    self._notices.sink.wake()
                return

    def stop(self) -> None:
        """Let the thread end once all callbacks have run."""
        self._stopped = True
        self._notices.sink.wake()

    def _serve(self) -> None:
        news = select.poll()
        news.register(self._notices.sink.fileno(), select.POLLIN)
        while not self._finished():
            news.poll()
            self._notices.read()

    def _finished(self) -> bool:
        with self._lock:
            self._serving = not self._stopped or bool(self._notices.waits)
            return not self._serving


_asyncio_readers: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Notices] = weakref.WeakKeyDictionary()
_asyncio_lock = threading.Lock()
_trio_readers: list[RunVar[Notices]] = []


def _asyncio_reader(fence: GpuFence, loop: asyncio.AbstractEventLoop) -> Notices:
    reader = _asyncio_readers.get(loop)
    if reader is None:
        reader = Notices(fence.device.new_sink())
        loop.add_reader(reader.sink.fileno(), reader.read)
        with _asyncio_lock:
            # What was still waiting when its loop was closed would keep that loop alive for ever.
            for closed in [one for one in _asyncio_readers if one.is_closed()]:
                del _asyncio_readers[closed]
            _asyncio_readers[loop] = reader
    return reader


def _trio_reader(fence: GpuFence) -> Notices:
    import trio

    if not _trio_readers:
        _trio_readers.append(trio.lowlevel.RunVar("asyncmem fences"))
    variable = _trio_readers[0]
    try:
        return variable.get()
    except LookupError:
        reader = Notices(fence.device.new_sink())
        variable.set(reader)
        trio.lowlevel.spawn_system_task(_read_on_trio, reader, name="asyncmem fences")
        return reader


async def _read_on_trio(reader: Notices) -> None:
    import trio

    while True:
        await trio.lowlevel.wait_readable(reader.sink.fileno())
        reader.read()


class GpuFence(ThreadedFence):
    """An event of the driver's, recorded once. It keeps the context; the event serves the next fence afterwards."""

    def __init__(self, device: Gpu, native: _calls.Fence) -> None:
        """Use a stream's `record` instead."""
        self._thread = device.callbacks
        self.device = device
        self.native = native

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

    def __await__(self) -> Generator[object, object, None]:
        """Wait on asyncio, uvloop or trio. Cancelling changes nothing on the device and leaves nothing behind.

        A fence that is reached already takes no loop iteration.

        Raises:
            InvalidRequest: No supported event loop runs this coroutine.
            DeviceError: The device is lost.
        """
        if self.done():
            return
        sleeper = sleeper_here(self)
        reader = _trio_reader(self) if in_trio() else _asyncio_reader(self, asyncio.get_running_loop())
        number, wait, watcher = next(reader.numbers), _Wait(self.native, sleeper.wake), self.device.watcher
        reader.waits[number] = wait
        try:
            watcher.watch(wait.fence, reader.sink, number)
            yield from sleeper.__await__()
        finally:
            reader.drop(watcher, number)
        if wait.code:
            raise self.device.fence_error("cuEventQuery", wait.code)
