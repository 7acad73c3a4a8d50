"""`set_memory_debug`: all pools are recorded in the background, for whoever wants to know afterwards."""

from __future__ import annotations

import threading
from typing import Final

from asyncmem.insight.recording import Recording

_FRAMES: Final = 8

_changing = threading.Lock()
_recording: Recording | None = None


def set_memory_debug(on: bool, *, frames: int = _FRAMES) -> None:
    """Begin or end to record all pools of the process in the background.

    Meanwhile out-of-memory errors and the warning of a pool that is closed under its buffers name the lines that hold
    most, and `dump_allocation_trace` and `analyze_allocation_patterns` need no argument. Ended, what was recorded is
    gone; beginning twice goes on with the first.

    Args:
        on: Whether to record.
        frames: How many lines of the call are kept of each request.
    """
    global _recording  # noqa: PLW0603 -- one a process
    with _changing:
        if on and _recording is None:
            recording = Recording(frames=frames)
            recording.__enter__()
            _recording = recording
        elif not on and _recording is not None:
            ending, _recording = _recording, None
            ending.__exit__(None, None, None)


def memory_debug() -> Recording | None:
    """Answer what records in the background, None where nothing does."""
    return _recording
