"""Errors of user code: whose they are, how to print them, what memory they keep alive, and time limits."""

from __future__ import annotations

import math
import traceback
from contextlib import suppress
from typing import TYPE_CHECKING, TypeVar

import anyio

from asyncmem.figures import format_duration

if TYPE_CHECKING:
    from collections.abc import Awaitable, Iterator
    from types import FrameType

T = TypeVar("T")


async def within(seconds: float | None, work: Awaitable[T]) -> T:
    """Await something for at most so many seconds.

    Raises:
        TimeoutError: It took longer, and was cancelled.
    """
    with anyio.move_on_after(seconds) as limit:
        return await work
    assert limit.cancelled_caught
    raise TimeoutError(f"it took longer than {format_duration(seconds or 0.0)}")


def is_own_error(error: BaseException) -> bool:
    """Return whether an error comes from the code that was called, not from its cancellation or the end of the process.

    On asyncio it may be a `CancelledError`: of something else that it awaited. Taken for a cancellation of the worker,
    it would end that in silence.
    """
    if isinstance(error, Exception):
        return True
    return isinstance(error, anyio.get_cancelled_exc_class()) and anyio.current_effective_deadline() > -math.inf


def describe_error(error: BaseException) -> str:
    """Describe an error in one line; of a group, each of its errors."""
    if isinstance(error, BaseExceptionGroup):
        return "; ".join(describe_error(one) for one in error.exceptions)
    try:
        text = str(error)
    except Exception:  # noqa: BLE001  # of the program's class, and no reason to lose what it is
        text = "its text cannot be had"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def clear_frames(error: BaseException) -> None:
    """Take the values out of the frames of an error and of those behind it: they would hold memory for as long.

    Behind a cancellation is what has happened to others, which is left alone.
    """
    in_use = set(_frames_of_tasks()) if isinstance(error, Exception) else ()
    for one in _behind(error):
        for frame, _ in traceback.walk_tb(one.__traceback__):
            if frame not in in_use:
                with suppress(RuntimeError):  # it is running
                    frame.clear()


def _behind(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    todo: list[BaseException | None] = [error]
    while todo:
        one = todo.pop()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            yield one
            if isinstance(one, BaseExceptionGroup):
                todo += one.exceptions
            if isinstance(one, Exception):
                todo += [one.__cause__, one.__context__]


def _frames_of_tasks() -> Iterator[FrameType]:
    """Go through the frames that tasks will go on in: an error may have passed through one of them and been caught.

    Before CPython 3.13 to clear such a frame ended its coroutine.
    """
    for task in anyio.get_running_tasks():
        awaited: object = task.coro
        while awaited is not None:
            frames = (getattr(awaited, name, None) for name in ("cr_frame", "gi_frame", "ag_frame"))
            yield from (frame for frame in frames if frame is not None)
            inner = (getattr(awaited, name, None) for name in ("cr_await", "gi_yieldfrom", "ag_await"))
            awaited = next((one for one in inner if one is not None), None)
