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
from typing import TYPE_CHECKING

from asyncmem.devices.awaiting import call_all, in_trio, join_thread, sleeper_here
from asyncmem.devices.base import Fence
from asyncmem.errors import DeviceError

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from trio.lowlevel import RunVar

    from asyncmem.devices.awaiting import AsyncioSleeper, TrioSleeper
    from asyncmem.devices.gpu import _calls
    from asyncmem.devices.gpu._calls import Sink, Watcher
    from asyncmem.devices.gpu.device import Gpu


class FenceCallbacks:
    """Callbacks by fence. The thread starts with the first and knows nothing of the device."""

    def __init__(self, name: str, sink: Sink, watcher: Watcher) -> None:
        """Name the thread; it does not start yet."""
        self._name = name
        self._sink = sink
        self._watcher = watcher
        self._numbers = itertools.count()
        self._waiting: dict[int, Callable[[], None]] = {}
        # Re-entrant: a finalizer may interrupt the holder on the same thread and ask for a fence.
        self._lock = threading.RLock()
        self._thread: threading.Thread | None = None
        self._stopping = False

    def add(self, fence: _calls.Fence, callback: Callable[[], None]) -> int:
        """Call back once the fence is reached, or never will be; return a number to drop it by."""
        with self._lock:
            token = next(self._numbers)
            if self._thread is None:
                self._stopping = False
                thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
                thread.start()
                self._thread = thread
            self._waiting[token] = callback
        try:
            self._watcher.watch(fence, self._sink, token)
        except BaseException:
            self._waiting.pop(token, None)
            raise
        return token

    def drop(self, token: int) -> None:
        """Forget a callback that has not run."""
        if self._waiting.pop(token, None) is not None:
            self._watcher.forget(self._sink, token)
            if self._stopping:
                self._sink.wake()

    def stop(self) -> None:
        """Let the thread end once all callbacks have run."""
        self._stopping = True
        self._sink.wake()

    def join(self) -> None:
        """Wait for the thread once it is stopped to end (blocks), unless this is that thread."""
        join_thread(self._thread)

    def _serve(self) -> None:
        news = select.poll()
        news.register(self._sink.fileno(), select.POLLIN)
        while not self._finished():
            news.poll()
            due = [self._waiting.pop(token, None) for token, _ in self._sink.take()]
            call_all(callback for callback in due if callback is not None)
            # Not kept while the thread sleeps: they may hold the last reference to anything.
            del due

    def _finished(self) -> bool:
        with self._lock:
            if self._stopping and not self._waiting:
                self._thread = None
                return True
            return False


class FenceReader:
    """Reads on one event loop which fences are reached."""

    def __init__(self, sink: Sink) -> None:
        """Read from `sink`, once the loop reads its descriptor."""
        self.sink = sink
        self._numbers = itertools.count()
        self._waiting: dict[int, tuple[AsyncioSleeper | TrioSleeper, list[int]]] = {}

    def wait(self, fence: GpuFence, sleeper: AsyncioSleeper | TrioSleeper) -> Generator[object, object, int]:
        """Suspend the task until the fence is reached, or never will be, and return 0 or the driver's code."""
        codes: list[int] = []
        token = next(self._numbers)
        self._waiting[token] = sleeper, codes
        try:
            fence.device.watcher.watch(fence.native, self.sink, token)
            yield from sleeper.__await__()
            return codes[0]
        finally:
            if self._waiting.pop(token, None) is not None:
                fence.device.watcher.forget(self.sink, token)

    def read(self) -> None:
        """Wake the tasks whose fences are reached."""
        for token, code in self.sink.take():
            sleeper, codes = self._waiting.pop(token, (None, []))
            if sleeper is not None:
                codes.append(code)
                sleeper.wake()


def wait(fence: GpuFence) -> Generator[object, object, None]:
    """Wait for `fence` as the body of an `__await__`; a fence that is reached already takes no loop iteration.

    Raises:
        InvalidRequest: No supported event loop runs this coroutine.
        DeviceError: The device is lost.
    """
    if fence.done():
        return
    sleeper = sleeper_here(fence)
    reader = _trio_reader(fence) if in_trio() else _asyncio_reader(fence, asyncio.get_running_loop())
    code = yield from reader.wait(fence, sleeper)
    if code:
        raise fence.device.fence_error("cuEventQuery", code)


_asyncio_readers: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, FenceReader] = weakref.WeakKeyDictionary()
_asyncio_lock = threading.Lock()
_trio_readers: list[RunVar[FenceReader]] = []


def _asyncio_reader(fence: GpuFence, loop: asyncio.AbstractEventLoop) -> FenceReader:
    reader = _asyncio_readers.get(loop)
    if reader is None:
        reader = FenceReader(fence.device.new_sink())
        loop.add_reader(reader.sink.fileno(), reader.read)
        with _asyncio_lock:
            # What was still waiting when its loop was closed would keep that loop alive for ever.
            for closed in [one for one in _asyncio_readers if one.is_closed()]:
                del _asyncio_readers[closed]
            _asyncio_readers[loop] = reader
    return reader


def _trio_reader(fence: GpuFence) -> FenceReader:
    import trio

    if not _trio_readers:
        _trio_readers.append(trio.lowlevel.RunVar("asyncmem fences"))
    variable = _trio_readers[0]
    try:
        return variable.get()
    except LookupError:
        reader = FenceReader(fence.device.new_sink())
        variable.set(reader)
        trio.lowlevel.spawn_system_task(_read_on_trio, reader, name="asyncmem fences")
        return reader


async def _read_on_trio(reader: FenceReader) -> None:
    import trio

    while True:
        await trio.lowlevel.wait_readable(reader.sink.fileno())
        reader.read()


class GpuFence(Fence):
    """An event of the driver's, recorded once. It keeps the context; the event serves the next fence afterwards."""

    def __init__(self, device: Gpu, native: _calls.Fence) -> None:
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

        token = self.device.callbacks.add(self.native, tell)
        waiting[key] = callback, token
        if over:
            waiting.pop(key, None)

    def forget(self, callback: Callable[[], None]) -> None:
        """Drop a callback that has not run."""
        for key, (known, token) in list(self._waiting.items()):
            if known == callback and self._waiting.pop(key, None) is not None:
                self.device.callbacks.drop(token)
                return

    def __await__(self) -> Generator[object, object, None]:
        """Wait on asyncio, uvloop or trio. Cancelling changes nothing on the device and leaves nothing behind.

        Raises:
            DeviceError: The device is lost.
        """
        return wait(self)
