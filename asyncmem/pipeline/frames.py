"""What an error keeps alive."""

from __future__ import annotations

import traceback


def empty_frames(error: BaseException) -> None:
    """Take the values out of the frames of an error and of those behind it: they would hold memory for as long."""
    seen: set[int] = set()
    todo: list[BaseException | None] = [error]
    while todo:
        one = todo.pop()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            traceback.clear_frames(one.__traceback__)
            todo += [one.__cause__, one.__context__]
            if isinstance(one, BaseExceptionGroup):
                todo += one.exceptions
