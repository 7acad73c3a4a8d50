"""Warnings from places where no error may be raised: finalizers, the worker, the end of a pool."""

from __future__ import annotations

import warnings


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


def report(error: Exception) -> None:
    """Have an error reported as unraisable, which it is here."""
    _Unraisable(error)
