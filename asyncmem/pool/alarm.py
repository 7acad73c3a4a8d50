"""Warnings from places where no error may be raised: finalizers, the worker, the end of a pool."""

from __future__ import annotations

import sys
import warnings
from types import SimpleNamespace


def alarm(text: str, category: type[Warning], *, level: int = 2) -> None:
    """Warn; where warnings are errors, report the error as unraisable instead of raising it.

    Args:
        text: What happened.
        category: The warning's class.
        level: How many callers up the warning points to.
    """
    try:
        warnings.warn(text, category, stacklevel=level + 1)
    except Warning as raised:
        sys.unraisablehook(
            SimpleNamespace(
                exc_type=category, exc_value=raised, exc_traceback=raised.__traceback__, err_msg=None, object=alarm
            )
        )
