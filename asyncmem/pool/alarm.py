"""Warnings from places where no error may be raised: finalizers, the worker, the end of a pool.

They point at a line of the program: the innermost frame that is neither of this package nor of the libraries between.
"""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Final

import anyio

from asyncmem.text import printable, printable_lines

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import CodeType

_PACKAGES: Final = Path(anyio.__file__).parents[1]
_STANDARD: Final = f"{Path(os.__file__).parent}{os.sep}"
_BETWEEN: Final = (
    f"{Path(__file__).parents[1]}{os.sep}",
    *(f"{_PACKAGES / name}{os.sep}" for name in ("anyio", "trio", "outcome")),
    "<frozen",
)


class _Unraisable:
    """Has the interpreter report an error as it reports those of finalizers: by raising it in one."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def __del__(self) -> None:
        raise self._error


def alarm(text: str, category: type[Warning], site: str | None = None) -> None:
    """Warn; what that raises, where warnings are errors or cannot be written, is reported as unraisable.

    Args:
        text: What happened.
        category: The warning's class.
        site: The line that did it ("file:line"); None for the one that called.
    """
    file, _, line = (site or caller_site()).rpartition(":")
    try:
        warnings.warn_explicit(printable_lines(text), category, printable(file, most=None), int(line))
    except Exception as raised:  # noqa: BLE001  # of the program's filters and hooks, and of a stream that is closed
        report(raised)


def caller_site() -> str:
    """Return "file:line" of the program's innermost frame; of its main file where a thread has none."""
    return _line(sys._getframe(1)) or f"{getattr(sys.modules.get('__main__'), '__file__', None) or '<the program>'}:1"


def waiting_site(owner: object) -> str | None:
    """Return "file:line" of the program where a task, or the thread of that number, waits, as far as that is known."""
    if isinstance(owner, int):
        return _line(sys._current_frames().get(owner))
    get_coro = getattr(owner, "get_coro", None)
    task = get_coro() if callable(get_coro) else getattr(owner, "coro", None)
    lines = [_site(frame) for frame in frames_of(task) if _is_the_programs(frame.f_code)]
    return lines[-1] if lines else None


def frames_of(coroutine: object) -> Iterator[FrameType]:
    """Return the frames that a suspended coroutine will go on in: its own, and those of what it awaits."""
    while coroutine is not None:
        frame = _one_of(coroutine, "cr_frame", "gi_frame", "ag_frame")
        if isinstance(frame, FrameType):
            yield frame
        coroutine = _one_of(coroutine, "cr_await", "gi_yieldfrom", "ag_await")


def _one_of(step: object, *names: str) -> object:
    return next((found for name in names if (found := getattr(step, name, None)) is not None), None)


def _line(frame: FrameType | None) -> str | None:
    while frame is not None and not _is_the_programs(frame.f_code):
        frame = frame.f_back
    return None if frame is None else _site(frame)


def _site(frame: FrameType) -> str:
    return f"{frame.f_code.co_filename}:{frame.f_lineno or 0}"  # code that was generated may have no lines


def _is_the_programs(code: CodeType) -> bool:
    file = code.co_filename
    return not file.startswith(_BETWEEN) and (not file.startswith(_STANDARD) or "site-packages" in file)


def report(error: Exception) -> None:
    """Report an error as unraisable."""
    _Unraisable(error)
