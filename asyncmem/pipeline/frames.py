"""What an error keeps alive."""

from __future__ import annotations

import traceback
from contextlib import suppress
from typing import TYPE_CHECKING

import anyio

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType


def empty_frames(error: BaseException) -> None:
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
