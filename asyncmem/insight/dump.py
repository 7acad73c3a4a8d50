"""`dump_allocation_trace`: the records themselves, a line each."""

from __future__ import annotations

import sys
from itertools import islice
from typing import TYPE_CHECKING

from asyncmem.core import Kind
from asyncmem.figures import format_duration, format_size
from asyncmem.insight.sources import Source, records_of

if TYPE_CHECKING:
    from typing import TextIO

    from asyncmem.insight.records import Record


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
    """Say a record in one line."""
    what = record.kind.name.lower().replace("_", " ")
    parts = [f"{record.time * 1e3:12.3f} ms", f"{what:<13}", f"{format_size(record.nbytes):>11}"]
    if record.number >= 0:
        parts.append(f"#{record.number}")
    parts += [f"{name} {value}" for name, value in _details(record)]
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
