"""A record as a row of plain values."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from asyncmem.insight.records import Record

COLUMNS: Final = (
    "time", "kind", "pool", "nbytes", "address", "stream", "number", "duration", "lifetime", "level", "outcome",
    "tag", "task", "thread", "file", "line", "function",
)  # fmt: skip


def row(record: Record) -> tuple[str | float | None, ...]:
    """Answer a record's values in the order of `COLUMNS`: seconds, bytes and words."""
    level = None if record.level is None else record.level.name.lower()
    kind = record.kind.name.lower()
    return (
        record.time, kind, record.pool, record.nbytes, record.address, record.stream, record.number, record.duration,
        record.lifetime, level, record.outcome, record.tag, record.task, record.thread,
        *(record.site or (None, None, None)),
    )  # fmt: skip
