"""Event loops, seen alike: where a waiter sleeps, and how another thread wakes it.

asyncio (with or without uvloop) and trio differ in four things only: their clock, how a task is suspended, how it is
woken, and how another thread gets a call in. Each class here is those four things for one running loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Generator
    from typing import Any

    import trio
    from trio.lowlevel import Abort


class Sleeper(Protocol):
    """One suspended task. `wake` may be called from any thread, more than once."""

    def wake(self) -> None: ...


class Parking(Protocol):
    """What a task sleeps on: it keeps its sleepers, and is told when a sleep ends badly."""

    deadline: float | None

    def admit(self, sleeper: Sleeper) -> bool:
        """Keep the sleeper until it is woken; False when there is nothing left to wait for."""

    def abandon(self, sleeper: Sleeper) -> None:
        """Undo: the sleeper was cancelled, before or after it was woken."""

    def expire(self) -> None:
        """Give up waiting, because the deadline has passed."""


class Home(Protocol):
    """The event loop that a pool serves."""

    @property
    def loop(self) -> object:
        """The asyncio loop, or None."""

    @property
    def now(self) -> Callable[[], float]:
        """The loop's clock, in seconds; any thread may ask it."""

    def is_running_here(self) -> bool: ...
    def is_closed(self) -> bool: ...
    def call(self, callback: Callable[[], None]) -> None:
        """Run a callback on the loop's thread, soon; dropped where the loop is gone. From any thread."""

    def park(self, place: Parking) -> Generator[Any, Any, None]:
        """Suspend until woken or past the deadline: ``yield from`` it, in an ``__await__``.

        A cancelled sleep calls `abandon` before it raises, also when the wake-up had come already.
        """

    def pause(self) -> Generator[Any, Any, None]:
        """Let the others of this loop run: ``yield from`` it, in an ``__await__``."""

    def current_task(self) -> object: ...


class Parked:
    """A sleep to `await`, for places that are coroutines themselves."""

    __slots__ = ("_home", "_place")

    def __init__(self, home: Home, place: Parking) -> None:
        self._home = home
        self._place = place

    def __await__(self) -> Generator[Any, Any, None]:
        return self._home.park(self._place)


class AsyncioHome:
    """A running asyncio loop, uvloop's included."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.now = time.monotonic if _is_own(loop.time, asyncio.BaseEventLoop.time) else loop.time
        own_future = _is_own(loop.create_future, asyncio.BaseEventLoop.create_future)
        self.future_type = asyncio.Future if own_future else None
        self.task_of = _task_of
        self.thread = threading.get_ident()
        self._inbox: deque[Callable[[], None]] = deque()
        self._armed = False

    def __repr__(self) -> str:
        return repr(self.loop)

    def is_running_here(self) -> bool:
        return asyncio._get_running_loop() is self.loop

    def is_closed(self) -> bool:
        return self.loop.is_closed()

    def current_task(self) -> object:
        return asyncio.current_task(self.loop)

    def call(self, callback: Callable[[], None]) -> None:
        if threading.get_ident() == self.thread:
            callback()
            return
        # Many completions share one wake-up of the loop: the first arms it, the drain disarms before it empties.
        self._inbox.append(callback)
        if not self._armed:
            self._armed = True
            try:
                self.loop.call_soon_threadsafe(self._drain)
            except RuntimeError:  # the loop has been closed: nobody is left to wake
                self._inbox.clear()

    def _drain(self) -> None:
        self._armed = False
        while self._inbox:
            self._inbox.popleft()()

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


def _is_own(method: object, expected: object) -> bool:
    """Say whether a loop has asyncio's own method, which may then be skipped for what it calls."""
    return getattr(method, "__func__", None) is expected


# In 3.11 the function is written in Python and asks for the running loop, a system call.
_task_of: Callable[[asyncio.AbstractEventLoop], object] = asyncio.current_task
if sys.version_info < (3, 12):
    _task_of = vars(asyncio.tasks)["_current_tasks"].get


class _AsyncioSleeper:
    __slots__ = ("_future", "_home")

    def __init__(self, home: AsyncioHome, future: asyncio.Future[None]) -> None:
        self._home = home
        self._future = future

    def wake(self) -> None:
        if threading.get_ident() != self._home.thread:
            self._home.call(self._finish)
        else:
            self._finish()

    def _finish(self) -> None:
        if not self._future.done():
            try:
                self._future.set_result(None)
            except RuntimeError:  # the loop has been closed, and its task is gone
                if not self._home.is_closed():
                    raise


class TrioHome:
    """A running trio loop."""

    def __init__(self) -> None:
        import trio

        self._trio = trio
        self.loop = None
        self.now = trio.lowlevel.current_clock().current_time  # the worker asks too, which trio.current_time forbids
        self._token = trio.lowlevel.current_trio_token()
        self.thread = threading.get_ident()

    def __repr__(self) -> str:
        return f"<trio run {id(self._token):#x}>"

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

    def call(self, callback: Callable[[], None]) -> None:
        if self.is_running_here():
            callback()
        else:
            self.soon(callback)

    def soon(self, callback: Callable[[], None]) -> None:
        """Run a callback in a later step of the loop; dropped where the loop is gone. From any thread."""
        with contextlib.suppress(self._trio.RunFinishedError):
            self._token.run_sync_soon(callback)

    def reschedule(self, task: trio.lowlevel.Task) -> None:
        """Resume a suspended task."""
        self._trio.lowlevel.reschedule(task)

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


class _TrioSleeper:
    __slots__ = ("_home", "_task", "done")

    def __init__(self, home: TrioHome, task: trio.lowlevel.Task) -> None:
        self._home = home
        self._task = task
        self.done = False

    def wake(self) -> None:
        # Never at once: a finalizer may wake a task in the very step that is about to suspend it.
        self._home.soon(self._finish)

    def _finish(self) -> None:
        if not self.done:
            self.done = True
            self._home.reschedule(self._task)


def _nothing() -> None:
    """Stand for a call whose only use is whether the loop takes it."""


def running_home(known: Home | None = None) -> Home | None:
    """Answer the event loop that runs on this thread, or None outside of any; reuses `known` where it is that loop."""
    loop = asyncio._get_running_loop()
    if loop is not None:
        return known if known is not None and known.loop is loop else AsyncioHome(loop)
    trio_package = sys.modules.get("trio")
    if trio_package is None or not trio_package.lowlevel.in_trio_run():
        return None
    return known if known is not None and known.is_running_here() else TrioHome()
