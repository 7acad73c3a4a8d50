"""Awaiting a fence on the loop that runs the caller: one descriptor a loop, which the native side makes readable.

The loop learns of any number of fences by one wake-up, and no thread takes the interpreter's lock for it. A wait that
was cancelled is forgotten on both sides, and news for a loop that is gone stay unread.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
import weakref
from typing import TYPE_CHECKING, Protocol

from asyncmem.devices.awaiting import in_trio
from asyncmem.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Generator

    from trio.lowlevel import Abort, RunVar, Task

    from asyncmem.devices.gpu.fence import GpuFence


class Reader(Protocol):
    """What takes news of fences in on one loop."""

    def wait(self, fence: GpuFence) -> Generator[object, object, int]:
        """Suspend the task until the fence is reached, or never will be, and answer 0 or the driver's code."""
        ...


def wait(fence: GpuFence) -> Generator[object, object, None]:
    """Wait for `fence` as the body of an `__await__`; a fence that is reached already takes no loop iteration.

    Raises:
        InvalidRequest: No supported event loop runs this coroutine.
        DeviceError: The device is lost.
    """
    if fence.done():
        return
    reader = _trio_reader(fence) if in_trio() else _asyncio_reader(fence)
    code = yield from reader.wait(fence)
    if code:
        raise fence.device.fence_error("cuEventQuery", code)


class AsyncioReader:
    """One running asyncio loop, uvloop's included. It does not keep the loop alive."""

    def __init__(self, loop: asyncio.AbstractEventLoop, fence: GpuFence) -> None:
        """Have the loop read a new descriptor."""
        self._loop = weakref.ref(loop)
        self._sink = fence.device.new_sink()
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[int]] = {}
        loop.add_reader(self._sink.fileno(), self._read)

    def wait(self, fence: GpuFence) -> Generator[object, object, int]:
        """Suspend the task on a future."""
        loop = self._loop()
        assert loop is not None
        token = next(self._numbers)
        future = self._waiting[token] = loop.create_future()
        try:
            fence.device.watcher.watch(fence.native, self._sink, token)
            code: int = yield from future
            return code
        finally:
            if self._waiting.pop(token, None) is not None:
                fence.device.watcher.forget(self._sink, token)

    def _read(self) -> None:
        for token, code in self._sink.take():
            future = self._waiting.pop(token, None)
            if future is not None and not future.done():
                future.set_result(code)


class TrioReader:
    """One trio run, of which a system task reads the descriptor."""

    def __init__(self, fence: GpuFence) -> None:
        """Start the task."""
        import trio

        self._trio = trio
        self._sink = fence.device.new_sink()
        self._numbers = itertools.count()
        self._waiting: dict[int, Task] = {}
        self._codes: dict[Task, int] = {}
        trio.lowlevel.spawn_system_task(self._serve, name="asyncmem fences")

    def wait(self, fence: GpuFence) -> Generator[object, object, int]:
        """Suspend the task."""
        return self._wait(fence).__await__()

    async def _wait(self, fence: GpuFence) -> int:
        task = self._trio.lowlevel.current_task()
        token = next(self._numbers)
        self._waiting[token] = task

        def abort(_raise_cancel: object) -> Abort:
            # The task must not be resumed by news that come after this.
            self._waiting.pop(token, None)
            fence.device.watcher.forget(self._sink, token)
            return succeeded

        succeeded: Abort = self._trio.lowlevel.Abort.SUCCEEDED
        try:
            fence.device.watcher.watch(fence.native, self._sink, token)
        except BaseException:
            del self._waiting[token]
            raise
        await self._trio.lowlevel.wait_task_rescheduled(abort)
        return self._codes.pop(task)

    async def _serve(self) -> None:
        while True:
            await self._trio.lowlevel.wait_readable(self._sink.fileno())
            for token, code in self._sink.take():
                task = self._waiting.pop(token, None)
                if task is not None:
                    self._codes[task] = code
                    self._trio.lowlevel.reschedule(task)


_asyncio_readers: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, AsyncioReader] = weakref.WeakKeyDictionary()
_asyncio_lock = threading.Lock()
_trio_readers: list[RunVar[TrioReader]] = []


def _asyncio_reader(fence: GpuFence) -> AsyncioReader:
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        raise InvalidRequest(
            "await", fence, "a task of asyncio, uvloop or trio", hint="elsewhere use block()"
        ) from None
    reader = _asyncio_readers.get(loop)
    if reader is None:
        reader = AsyncioReader(loop, fence)
        with _asyncio_lock:
            # What was still waiting when its loop was closed would keep that loop alive for ever.
            for closed in [one for one in _asyncio_readers if one.is_closed()]:
                del _asyncio_readers[closed]
            _asyncio_readers[loop] = reader
    return reader


def _trio_reader(fence: GpuFence) -> TrioReader:
    import trio

    if not _trio_readers:
        _trio_readers.append(trio.lowlevel.RunVar("asyncmem fences"))
    variable = _trio_readers[0]
    try:
        return variable.get()
    except LookupError:
        reader = TrioReader(fence)
        variable.set(reader)
        return reader
