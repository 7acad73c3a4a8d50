"""Event loops, seen alike: how a task sleeps and is woken, how another thread gets a call in, and timers.

asyncio (with or without uvloop) and trio differ in these things only. A request that waits on asyncio does so in the
compiled core; everything else that sleeps uses `Parked`.
"""

from __future__ import annotations

import asyncio
import sys
import time
from contextvars import Context
from functools import partial
from typing import TYPE_CHECKING, Protocol

from asyncmem.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Generator
    from typing import Any

    import trio
    from trio.lowlevel import Abort


class Sleeper(Protocol):
    """One suspended task. `wake` may be called from any thread, more than once; False where its loop is closed."""

    def wake(self) -> bool | None: ...


class Parking(Protocol):
    """What a task sleeps on."""

    deadline: float | None

    def admit(self, sleeper: Sleeper) -> bool:
        """Keep the sleeper until it is woken; False when there is nothing left to wait for."""

    def abandon(self, sleeper: Sleeper) -> None:
        """Forget the sleeper, which was cancelled before or after it was woken."""

    def expire(self) -> None:
        """Give up waiting: the deadline has passed."""


class Timer(Protocol):
    """A call that is due at some time. `cancel` may be called from any thread."""

    def cancel(self) -> None: ...


class EventLoop(Protocol):
    """The event loop that a pool serves."""

    @property
    def future_type(self) -> Callable[..., asyncio.Future[Any]] | None:
        """asyncio's own future, where the loop makes no other."""

    @property
    def loop(self) -> object:
        """The asyncio loop, or None."""

    @property
    def now(self) -> Callable[[], float]:
        """The loop's clock, in seconds; any thread may ask it."""

    @property
    def task_of(self) -> Callable[[Any], object]:
        """What returns the task that runs on an asyncio loop."""

    def is_running_here(self) -> bool: ...
    def is_closed(self) -> bool: ...
    def call(self, callback: Callable[[], object]) -> bool:
        """Run a callback on the loop's thread: now if this is it, else soon. False where the loop is closed."""

    def call_at(self, when: float, callback: Callable[[], object]) -> Timer:
        """Run a callback on the loop's thread at a time of its clock. From any thread."""

    def park(self, place: Parking) -> Generator[Any, Any, None]:
        """Suspend until woken or past the deadline: ``yield from`` it, in an ``__await__``.

        A cancelled sleep calls `abandon` before it raises, also when the wake-up had come already.
        """

    def pause(self) -> Generator[Any, Any, None]:
        """Let other tasks of this loop run: ``yield from`` it, in an ``__await__``."""

    def current_task(self) -> object: ...


class Parked:
    """A sleep to `await`, for places that are coroutines themselves."""

    __slots__ = ("_loop", "_place")

    def __init__(self, loop: EventLoop, place: Parking) -> None:
        self._loop = loop
        self._place = place

    def __await__(self) -> Generator[Any, Any, None]:
        return self._loop.park(self._place)


class _OwnTimer:
    """A timer that was set on its loop's thread; no other may touch what the loop has given for it."""

    __slots__ = ("_handle", "_loop")

    def __init__(self, loop: EventLoop, handle: asyncio.TimerHandle | trio.CancelScope) -> None:
        self._loop = loop
        self._handle = handle

    def cancel(self) -> None:
        """Undo it."""
        self._loop.call(self._handle.cancel)


class _LaterTimer:
    """A timer that was set from another thread than its loop's."""

    def __init__(self, loop: EventLoop, when: float, callback: Callable[[], object]) -> None:
        self._loop = loop
        self._cancelled = False
        self._timer: Timer | None = None
        loop.call(partial(self._set, when, callback))

    def _set(self, when: float, callback: Callable[[], object]) -> None:
        if not self._cancelled:
            self._timer = self._loop.call_at(when, callback)

    def cancel(self) -> None:
        """Undo it."""
        self._cancelled = True
        self._loop.call(self._drop)

    def _drop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()


def _is_own(method: object, expected: object) -> bool:
    """Return whether a loop has asyncio's own method, which may then be skipped for what it calls."""
    return getattr(method, "__func__", None) is expected


# In 3.11 the function is written in Python and asks for the running loop, a system call.
_task_of: Callable[[asyncio.AbstractEventLoop], object] = asyncio.current_task
if sys.version_info < (3, 12):
    _task_of = vars(asyncio.tasks)["_current_tasks"].get


class AsyncioLoop:
    """An asyncio loop, uvloop's included."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.now = time.monotonic if _is_own(loop.time, asyncio.BaseEventLoop.time) else loop.time
        own_future = _is_own(loop.create_future, asyncio.BaseEventLoop.create_future)
        self.future_type = asyncio.Future if own_future else None
        self.task_of = _task_of

    def __repr__(self) -> str:
        return repr(self.loop)

    def is_running_here(self) -> bool:
        return asyncio._get_running_loop() is self.loop

    def is_closed(self) -> bool:
        return self.loop.is_closed()

    def current_task(self) -> object:
        return asyncio.current_task(self.loop)

    def call(self, callback: Callable[[], object]) -> bool:
        if self.is_running_here():
            callback()
            return True
        try:
            self.loop.call_soon_threadsafe(callback, context=Context())
        except RuntimeError:
            if not self.loop.is_closed():
                raise
            return False
        return True

    def call_at(self, when: float, callback: Callable[[], object]) -> Timer:
        if self.is_running_here():
            return _OwnTimer(self, self.loop.call_at(when, callback, context=Context()))
        return _LaterTimer(self, when, callback)

    def park(self, place: Parking) -> Generator[Any, Any, None]:
        future = self.loop.create_future()
        sleeper = _AsyncioSleeper(self, future)
        timer = None if place.deadline is None else self.loop.call_at(place.deadline, place.expire)
        try:
            if place.admit(sleeper):
                yield from future
        except BaseException:
            place.abandon(sleeper)
            raise
        finally:
            if timer is not None:
                timer.cancel()

    def pause(self) -> Generator[Any, Any, None]:
        yield  # what asyncio.sleep(0) comes to


class _AsyncioSleeper:
    __slots__ = ("_future", "_loop")

    def __init__(self, loop: AsyncioLoop, future: asyncio.Future[None]) -> None:
        self._loop = loop
        self._future = future

    def wake(self) -> bool:
        return self._loop.call(self._finish)

    def _finish(self) -> None:
        if not self._future.done():
            try:
                self._future.set_result(None)
            except RuntimeError:  # the loop has been closed, and its task is gone
                if not self._loop.is_closed():
                    raise


class TrioLoop:
    """A running trio loop."""

    future_type = None

    def __init__(self) -> None:
        import trio

        self._trio = trio
        self.loop = None
        self.now = trio.lowlevel.current_clock().current_time  # the worker asks too, which trio.current_time forbids
        self._token = trio.lowlevel.current_trio_token()

    def __repr__(self) -> str:
        return f"<trio run {id(self._token):#x}>"

    def task_of(self, loop: object) -> object:  # noqa: ARG002  # there is only one
        return self.current_task()

    def is_running_here(self) -> bool:
        return self._trio.lowlevel.in_trio_run() and self._trio.lowlevel.current_trio_token() is self._token

    def is_closed(self) -> bool:
        try:
            self._token.run_sync_soon(_nothing, idempotent=True)
        except self._trio.RunFinishedError:
            return True
        return False

    def current_task(self) -> object:
        return self._trio.lowlevel.current_task()

    def call(self, callback: Callable[[], object]) -> bool:
        if self.is_running_here():
            callback()
            return True
        return self.soon(callback)

    def soon(self, callback: Callable[[], object]) -> bool:
        """Run a callback in a later step of the loop, from any thread; False where the loop is over."""
        try:
            self._token.run_sync_soon(callback)
        except self._trio.RunFinishedError:
            return False
        return True

    def call_at(self, when: float, callback: Callable[[], object]) -> Timer:
        if self.is_running_here():
            return _OwnTimer(self, self._sleep_until(when, callback))
        return _LaterTimer(self, when, callback)

    def _sleep_until(self, when: float, callback: Callable[[], object]) -> trio.CancelScope:
        """Have a system task make a call when it is due; return the scope that it sleeps in."""
        scope = self._trio.CancelScope()

        async def wait() -> None:
            with scope:
                await self._trio.sleep_until(when)
                callback()

        self._trio.lowlevel.spawn_system_task(wait)
        return scope

    def park(self, place: Parking) -> Generator[Any, Any, None]:
        return self._park(place).__await__()

    async def _park(self, place: Parking) -> None:
        trio = self._trio
        succeeded: Abort = trio.lowlevel.Abort.SUCCEEDED
        sleeper = _TrioSleeper(self, trio.lowlevel.current_task())

        def abort(_: object) -> Abort:
            sleeper.done = True
            return succeeded

        try:
            with trio.CancelScope(deadline=float("inf") if place.deadline is None else place.deadline) as scope:
                if place.admit(sleeper):
                    await trio.lowlevel.wait_task_rescheduled(abort)
        except BaseException:
            place.abandon(sleeper)
            raise
        if scope.cancelled_caught:
            place.expire()

    def pause(self) -> Generator[Any, Any, None]:
        return self._trio.lowlevel.checkpoint().__await__()

    def reschedule(self, task: trio.lowlevel.Task) -> None:
        """Resume a suspended task."""
        self._trio.lowlevel.reschedule(task)


class _TrioSleeper:
    __slots__ = ("_loop", "_task", "done")

    def __init__(self, loop: TrioLoop, task: trio.lowlevel.Task) -> None:
        self._loop = loop
        self._task = task
        self.done = False

    def wake(self) -> bool:
        # Never at once: a finalizer may wake a task in the very step that is about to suspend it.
        return self._loop.soon(self._finish)

    def _finish(self) -> None:
        if not self.done:
            self.done = True
            self._loop.reschedule(self._task)


def _nothing() -> None:
    """Stand for a call whose only use is whether the loop takes it."""


def running_loop(known: EventLoop | None = None) -> EventLoop | None:
    """Return the event loop that runs on this thread, None outside of any; `known` where it is that one."""
    loop = asyncio._get_running_loop()
    if loop is not None:
        return known if known is not None and known.loop is loop else AsyncioLoop(loop)
    trio_package = sys.modules.get("trio")
    if trio_package is None or not trio_package.lowlevel.in_trio_run():
        return None
    return known if known is not None and known.is_running_here() else TrioLoop()


def need_running_loop(what: object, known: EventLoop | None = None) -> EventLoop:
    """Return the event loop that runs here.

    Raises:
        InvalidRequest: None runs here.
    """
    loop = running_loop(known)
    if loop is None:
        raise InvalidRequest("await", what, "a running event loop, asyncio's or trio's")
    return loop
