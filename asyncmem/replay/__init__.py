"""Recordings of what programs allocate: read from files of several kinds, checked, and made ready to be replayed."""

from asyncmem.replay.columns import Op
from asyncmem.replay.reading import read
from asyncmem.replay.snapshot import from_snapshot
from asyncmem.replay.trace import Steps, Trace

__all__ = ["Op", "Steps", "Trace", "from_snapshot", "read"]
