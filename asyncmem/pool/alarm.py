"""Warnings from places where no error may be raised: finalizers, the worker, the end of a pool."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

_PACKAGE = str(Path(__file__).parents[1])


class _Unraisable:
    """Has the interpreter report an error as it reports those of finalizers: by raising it in one."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def __del__(self) -> None:
        raise self._error


def alarm(text: str, category: type[Warning], *, level: int = 2) -> None:
    """Warn; where warnings are errors, have the error reported as unraisable instead of raising it.

    Args:
        text: What happened.
        category: The warning's class.
        level: How many callers up the warning points to.
    """
    try:
        warnings.warn(text, category, stacklevel=level + 1)
    except Warning as raised:
        report(raised)


def alarm_at(text: str, category: type[Warning], site: str) -> None:
    """Warn as `alarm` does, of something that a line of the program ("file:line") did."""
    file, _, line = site.rpartition(":")
    try:
        warnings.warn_explicit(text, category, file, int(line))
    except Warning as raised:
        report(raised)


def caller_site() -> str:
    """Return "file:line" of the innermost frame outside of this package."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def report(error: Exception) -> None:
    """Have an error reported as unraisable, which it is here."""
    _Unraisable(error)
