"""`set_memory_debug` records all pools in the background; `dump_allocation_trace` prints what any source recorded."""

from __future__ import annotations

import sys
import threading
from itertools import islice
from typing import TYPE_CHECKING, Final, Protocol, TypeAlias

from asyncmem.core import Kind
from asyncmem.errors import InvalidRequest
from asyncmem.figures import format_duration, format_size
from asyncmem.insight.recording import Recording
from asyncmem.insight.records import Records
from asyncmem.text import printable

if TYPE_CHECKING:
    from typing import TextIO

    from asyncmem.insight.records import Record


class HasRecords(Protocol):
    """A recording, a profile or a tracker."""

    def records(self) -> Records:
        """Return what was recorded."""


Source: TypeAlias = Records | HasRecords

_FRAMES: Final = 8

_changing = threading.Lock()
_recording: Recording | None = None


def set_memory_debug(on: bool, *, frames: int = _FRAMES) -> None:
    """Begin or end recording all pools of the process in the background.

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
    """Return the recording in the background, None without one."""
    return _recording


def records_of(source: Source | None) -> Records:
    """Return the records of a recording, profile or tracker, or those of the background.

    Raises:
        InvalidRequest: There is no source, and nothing records in the background.
    """
    if isinstance(source, Records):
        return source
    found = memory_debug() if source is None else source
    if found is None:
        hint = "call set_memory_debug(True) before, or give a recording, a profile or a tracker"
        raise InvalidRequest("source", None, "something that has records", hint=hint)
    return found.records()


def dump_allocation_trace(source: Source | None = None, *, last: int | None = 100, file: TextIO | None = None) -> None:
    """Print records, oldest first, a line each: when, what, how much, by which tag, task and line.

    Args:
        source: A recording, a profile, a tracker or records; what `set_memory_debug` records without one.
        last: At most so many, the newest; None for all.
        file: Where to; standard output without one.

    Raises:
        InvalidRequest: There is no source, and nothing records in the background.
    """
    records = records_of(source)
    skipped = max(len(records) - last, 0) if last is not None else 0
    out = file or sys.stdout
    if skipped:
        out.write(f"{skipped:,} earlier records are left out\n")
    for record in islice(records, skipped, None):
        out.write(f"{line_of(record)}\n")


def line_of(record: Record) -> str:
    """Return a record as one line."""
    what = record.kind.name.lower().replace("_", " ")
    parts = [f"{record.time * 1e3:12.3f} ms", f"{what:<13}", f"{format_size(record.nbytes):>11}"]
    if record.number >= 0:
        parts.append(f"#{record.number}")
    parts += [f"{name} {printable(str(value))}" for name, value in _details(record)]
    return "  ".join(parts)


def _details(record: Record) -> list[tuple[str, object]]:
    details: list[tuple[str, object]] = [("pool", record.pool)]
    if record.address:
        details.append(("at", f"{record.address:#x}"))
    if record.level is not None:
        details.append(("by", record.level.name.lower()))
    if record.kind is Kind.FREED:
        details.append(("after", format_duration(record.lifetime)))
    elif record.duration:
        details.append(("took", format_duration(record.duration)))
    named = {"": record.outcome, "tag": record.tag, "task": record.task, "thread": record.thread, "in": record.site}
    return details + [(name, value) for name, value in named.items() if value]
