"""Suspend a task on whichever event loop runs it, asyncio, uvloop or trio; and what threads of devices do alike.

The device's thread calls back at a time of its own choosing, so two things must hold: a wait that was cancelled leaves
no callback behind, and a callback that finds its loop gone does nothing, because no task is left to wake.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from contextvars import Context
from typing import TYPE_CHECKING, Any

from asyncmem.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable

    import trio


def sleeper_here(what: object) -> AsyncioSleeper | TrioSleeper:
    """Return what suspends the task that runs here when it is awaited, until it is woken; for one `await`.

    Raises:
        InvalidRequest: No supported event loop runs this coroutine, which is to await `what`.
    """
    if in_trio():
        return TrioSleeper()
    try:
        return AsyncioSleeper(asyncio.get_running_loop())
    except RuntimeError:
        raise InvalidRequest("await", what, "a task of asyncio, uvloop or trio", hint="elsewhere use block()") from None


def runs_here(loop: asyncio.AbstractEventLoop) -> bool:
    """Return whether a loop of asyncio runs on this thread."""
    # CPython 3.11 asks the kernel who it is before it tells; its own loops know their thread.
    if sys.version_info < (3, 12) and isinstance(loop, asyncio.BaseEventLoop):
        return loop._thread_id == threading.get_ident()  # type: ignore[attr-defined, no-any-return]
    return asyncio._get_running_loop() is loop


def let_others_run() -> Generator[object, object, None]:
    """Give every other task of the loop a turn, once."""
    if in_trio():
        yield from _trio_checkpoint().__await__()
    else:
        yield None


def in_trio() -> bool:
    """Return whether a trio task runs this code. Asked first: trio may be a guest of an asyncio loop."""
    trio = sys.modules.get("trio")
    return trio is not None and bool(trio.lowlevel.in_trio_task())


async def _trio_checkpoint() -> None:
    import trio  # only a program that runs trio gets here

    await trio.lowlevel.checkpoint()


class AsyncioSleeper:
    """A task of asyncio or uvloop."""

    __slots__ = ("_future",)

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._future: asyncio.Future[None] = loop.create_future()

    def __await__(self) -> Generator[Any, Any, None]:
        return self._future.__await__()

    def wake(self) -> bool:
        """Wake the task, from any thread and more than once; return False if its loop is closed."""
        loop = self._future.get_loop()
        try:
            if runs_here(loop):
                self._resolve()
            else:
                loop.call_soon_threadsafe(self._resolve, context=Context())
        except RuntimeError:  # the loop is closed, and its task is gone
            if not loop.is_closed():
                raise
            return False
        return True

    def _resolve(self) -> None:
        if not self._future.done():
            self._future.set_result(None)


class TrioSleeper:
    """A task of trio."""

    __slots__ = ("_task", "_token", "_trio", "_waits")

    def __init__(self) -> None:
        import trio  # only a program that runs trio gets here

        self._trio = trio
        self._task = trio.lowlevel.current_task()
        self._token = trio.lowlevel.current_trio_token()
        self._waits = True

    def __await__(self) -> Generator[Any, Any, None]:
        return self._trio.lowlevel.wait_task_rescheduled(self._abort).__await__()

    def wake(self) -> bool:
        """Wake the task, from any thread and more than once; return False if its run is over."""
        try:
            # Never at once: a finalizer may wake a task in the very step that is about to suspend it.
            self._token.run_sync_soon(self._resume)
        except self._trio.RunFinishedError:
            return False
        return True

    def _resume(self) -> None:
        if self._waits:
            self._waits = False
            self._trio.lowlevel.reschedule(self._task)

    def _abort(self, _raise_cancel: object) -> trio.lowlevel.Abort:
        self._waits = False
        return self._trio.lowlevel.Abort.SUCCEEDED


def join_thread(thread: threading.Thread | None) -> None:
    """Wait for the end of a thread (blocks), unless it is the calling one, or could not be started."""
    if thread is not None and thread.is_alive() and thread is not threading.current_thread():
        thread.join()


def call_all(callbacks: Iterable[Callable[[], object]]) -> None:
    """Call each of them; an error goes to `threading.excepthook` and keeps no other from being called."""
    for callback in callbacks:
        try:
            callback()
        except Exception as error:  # noqa: BLE001  # a stream whose thread ends here would hang for ever
            here = threading.current_thread()
            threading.excepthook(threading.ExceptHookArgs((type(error), error, error.__traceback__, here)))
