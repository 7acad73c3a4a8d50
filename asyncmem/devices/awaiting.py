"""Await a fence on whichever event loop runs the caller: asyncio, uvloop or trio.

The device's thread calls back at a time of its own choosing, so two things must hold: a wait that was cancelled leaves
no callback behind, and a callback that finds its loop gone does nothing, because nobody is left to be woken.
"""

import asyncio
import sys
from collections.abc import Callable, Generator
from typing import Protocol

from asyncmem.errors import InvalidRequest


class Notifying(Protocol):
    """The part of a fence that waiting needs."""

    def done(self) -> bool:
        """Tell whether there is nothing left to wait for."""
        ...

    def notify(self, callback: Callable[[], None]) -> None:
        """Call back once, at once or from any thread."""
        ...

    def forget(self, callback: Callable[[], None]) -> None:
        """Drop a callback that has not run."""
        ...


def wait_until_done(fence: Notifying) -> Generator[object, object, None]:
    """Wait for `fence` as the body of an `__await__`; a fence that is reached already takes no loop iteration.

    Raises:
        InvalidRequest: no supported event loop runs this coroutine.
    """
    if fence.done():
        return
    if in_trio():
        yield from _wait_on_trio(fence).__await__()
    else:
        yield from _wait_on_asyncio(fence)


def let_others_run() -> Generator[object, object, None]:
    """Give every other task of the loop a turn, once."""
    if in_trio():
        yield from _trio_checkpoint().__await__()
    else:
        yield None


def in_trio() -> bool:
    """Tell whether a trio task runs this code. Asked first: trio may be a guest of an asyncio loop."""
    trio = sys.modules.get("trio")
    return trio is not None and bool(trio.lowlevel.in_trio_task())


def _wait_on_asyncio(fence: Notifying) -> Generator[object, object, None]:
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        raise InvalidRequest(
            "await", fence, "a task of asyncio, uvloop or trio", hint="elsewhere use block()"
        ) from None
    reached: asyncio.Future[None] = loop.create_future()

    def settle() -> None:
        if not reached.done():
            reached.set_result(None)

    def wake() -> None:
        try:
            loop.call_soon_threadsafe(settle)
        except RuntimeError:
            return  # the loop is closed, and its waiters with it

    fence.notify(wake)
    try:
        yield from reached
    finally:
        fence.forget(wake)


async def _trio_checkpoint() -> None:
    import trio  # only a program that runs trio gets here

    await trio.lowlevel.checkpoint()


async def _wait_on_trio(fence: Notifying) -> None:
    import trio  # only a program that runs trio gets here

    task = trio.lowlevel.current_task()
    token = trio.lowlevel.current_trio_token()
    waiting = True

    def resume() -> None:
        nonlocal waiting
        if waiting:
            waiting = False
            trio.lowlevel.reschedule(task)

    def wake() -> None:
        try:
            token.run_sync_soon(resume)
        except trio.RunFinishedError:
            return  # the run is over, and its waiters with it

    def abort(_raise_cancel: object) -> trio.lowlevel.Abort:
        nonlocal waiting
        waiting = False
        return trio.lowlevel.Abort.SUCCEEDED

    fence.notify(wake)
    try:
        await trio.lowlevel.wait_task_rescheduled(abort)
    finally:
        fence.forget(wake)
