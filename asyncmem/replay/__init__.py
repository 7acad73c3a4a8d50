"""Recordings of what programs allocate, checked and made ready to be replayed."""

from asyncmem.replay.columns import Op
from asyncmem.replay.trace import Steps, Trace

__all__ = ["Op", "Steps", "Trace"]
