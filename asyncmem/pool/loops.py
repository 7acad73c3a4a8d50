"""Event loops, seen alike: how a task sleeps and is woken, how another thread gets a call in, and timers.

asyncio (with or without uvloop) and trio differ in these things only. A request that waits on asyncio does so in the
compiled core; everything else sleeps on a `Latch`.
"""

from __future__ import annotations

import asyncio
import sys
import time
from abc import ABC, abstractmethod
from contextvars import Context
from functools import partial
from typing import TYPE_CHECKING, Protocol

from asyncmem.devices.awaiting import TrioSleeper, let_others_run, runs_here
from asyncmem.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    import trio


class Sleeper(Protocol):
    """One suspended task. `wake` may be called from any thread, more than once; False where its loop is closed."""

    def wake(self) -> bool | None: ...


class EventLoop(ABC):
    """The event loop that a pool serves.

    Attributes:
        loop: The asyncio loop, or None.
        future_type: asyncio's own future, where the loop makes no other.
        now: The loop's clock, in seconds; any thread may ask it.
    """

    loop: asyncio.AbstractEventLoop | None = None
    future_type: Callable[..., asyncio.Future[Any]] | None = None
    now: Callable[[], float]

    @abstractmethod
    def is_running_here(self) -> bool:
        """Return whether it runs on this thread."""

    @abstractmethod
    def is_closed(self) -> bool:
        """Return whether it runs nothing any more."""

    @abstractmethod
    def soon(self, callback: Callable[[], object]) -> bool:
        """Run a callback in a later step of the loop, from any thread; False where the loop is closed."""

    @abstractmethod
    def set_timer(self, when: float, callback: Callable[[], object]) -> asyncio.TimerHandle | trio.CancelScope:
        """Set a timer on the loop's thread; return what cancels it there."""

    def call(self, callback: Callable[[], object]) -> bool:
        """Run a callback on the loop's thread: now if this is it, else soon. False where the loop is closed."""
        if self.is_running_here():
            callback()
            return True
        return self.soon(callback)

    def call_at(self, when: float, callback: Callable[[], object]) -> Timer:
        """Run a callback on the loop's thread at a time of its clock. From any thread."""
        return Timer(self, when, callback)


class Timer:
    """A call that is due at some time. It is set and cancelled on its loop's thread."""

    __slots__ = ("_cancelled", "_handle", "_loop")

    def __init__(self, loop: EventLoop, when: float, callback: Callable[[], object]) -> None:
        self._loop = loop
        self._cancelled = False
        self._handle: asyncio.TimerHandle | trio.CancelScope | None = None
        loop.call(partial(self._set, when, callback))

    def cancel(self) -> None:
        """Undo it. From any thread."""
        self._cancelled = True
        self._loop.call(self._drop)

    def _set(self, when: float, callback: Callable[[], object]) -> None:
        if not self._cancelled:
            self._handle = self._loop.set_timer(when, callback)

    def _drop(self) -> None:
        if self._handle is not None:
            self._handle.cancel()


def _is_own(method: object, expected: object) -> bool:
    """Return whether a loop has asyncio's own method, which may then be skipped for what it calls."""
    return getattr(method, "__func__", None) is expected


class AsyncioLoop(EventLoop):
    """An asyncio loop, uvloop's included."""

    loop: asyncio.AbstractEventLoop

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.now = time.monotonic if _is_own(loop.time, asyncio.BaseEventLoop.time) else loop.time
        self.future_type = asyncio.Future if _is_own(loop.create_future, asyncio.BaseEventLoop.create_future) else None

    def __repr__(self) -> str:
        return repr(self.loop)

    def is_running_here(self) -> bool:
        return runs_here(self.loop)

    def is_closed(self) -> bool:
        return self.loop.is_closed()

    def soon(self, callback: Callable[[], object]) -> bool:
        try:
            self.loop.call_soon_threadsafe(callback, context=Context())
        except RuntimeError:
            if not self.loop.is_closed():
                raise
            return False
        return True

    def set_timer(self, when: float, callback: Callable[[], object]) -> asyncio.TimerHandle:
        return self.loop.call_at(when, callback, context=Context())


class TrioLoop(EventLoop):
    """A running trio loop. A compiled request sleeps on it by a `sleeper`, and lets it `turn`."""

    sleeper = TrioSleeper
    turn = staticmethod(let_others_run)

    def __init__(self) -> None:
        import trio

        self._trio = trio
        self.now = trio.lowlevel.current_clock().current_time  # the worker asks too, which trio.current_time forbids
        self._token = trio.lowlevel.current_trio_token()

    def __repr__(self) -> str:
        return f"<trio run {id(self._token):#x}>"

    def is_running_here(self) -> bool:
        return self._trio.lowlevel.in_trio_run() and self._trio.lowlevel.current_trio_token() is self._token

    def is_closed(self) -> bool:
        return not self.soon(lambda: None)

    def soon(self, callback: Callable[[], object]) -> bool:
        try:
            self._token.run_sync_soon(callback)
        except self._trio.RunFinishedError:
            return False
        return True

    def set_timer(self, when: float, callback: Callable[[], object]) -> trio.CancelScope:
        scope = self._trio.CancelScope()

        async def wait() -> None:
            with scope:
                await self._trio.sleep_until(when)
                callback()

        self._trio.lowlevel.spawn_system_task(wait)
        return scope


def running_loop(known: EventLoop | None = None) -> EventLoop | None:
    """Return the event loop that runs on this thread, None outside of any; `known` where it is that one."""
    if known is not None and known.loop is not None and known.is_running_here():
        return known
    loop = asyncio._get_running_loop()
    if loop is not None:
        return AsyncioLoop(loop)
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
