"""What code that is not ours raised: whether it belongs to the item, and how to say it."""

from __future__ import annotations

import math

import anyio


def is_its_own(error: BaseException) -> bool:
    """Say whether an error comes from the code that was called, and not from its being cancelled or the process ending.

    On asyncio it may be a `CancelledError`: of something else that it awaited. Taken for a cancellation of the worker,
    it would end that in silence.
    """
    if isinstance(error, Exception):
        return True
    return isinstance(error, anyio.get_cancelled_exc_class()) and anyio.current_effective_deadline() > -math.inf


def said(error: BaseException) -> str:
    """Say in one line what an error is; of a group, what each of its errors is."""
    if isinstance(error, BaseExceptionGroup):
        return "; ".join(said(one) for one in error.exceptions)
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
