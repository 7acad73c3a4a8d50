"""Records in formats that other programs read: CSV and JSON here, those of viewers in a module each."""

from __future__ import annotations

import csv
import re
from functools import partial
from io import TextIOWrapper
from typing import TYPE_CHECKING, BinaryIO, Final, TextIO

from asyncmem.insight.exports.perfetto import write_perfetto
from asyncmem.insight.exports.torch import write_torch
from asyncmem.text import printable, to_json

if TYPE_CHECKING:
    from collections.abc import Callable

    from asyncmem.insight.records import Record, Records

COLUMNS: Final = (
    "time", "kind", "pool", "nbytes", "address", "stream", "number", "duration", "lifetime", "level", "outcome",
    "tag", "task", "thread", "file", "line", "function", "priority",
)  # fmt: skip

_FORMULA: Final = re.compile(r"(^|[;|])(?=\s*[=+\-@\uff1d\uff0b\uff0d\uff20])")


def write_csv(records: Records, file: TextIO) -> None:
    """Write all records; what is not known is empty.

    Texts are escaped as `printable` does, and have a ``'`` where a program for tables would see a formula.
    """
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(COLUMNS)
    writer.writerows([_cell(one) for one in _row(record)] for record in records)


def _cell(value: str | float | None) -> str | float | None:
    # Programs for tables compute what looks like a formula; some of them cut lines at semicolons, too.
    return _FORMULA.sub(r"\1'", printable(value, most=None)) if isinstance(value, str) else value


def write_json(records: Records, file: TextIO) -> None:
    """Write an object: the pools, what is missing, and the records, one a line."""
    head = {
        "began": records.wall,
        "lost": records.lost,
        "note": records.note,
        "pools": [pool._asdict() for pool in records.names.pools],
    }
    file.write(to_json(head)[:-1] + ', "records": [')
    between = "\n"
    for record in records:
        file.write(between + to_json(_plain(record)))
        between = ",\n"
    file.write("\n]}\n")


def _plain(record: Record) -> dict[str, object]:
    found: dict[str, object] = dict(zip(COLUMNS, _row(record), strict=True))
    found["frames"] = [site._asdict() for site in record.frames]
    return found


def _row(record: Record) -> tuple[str | float | None, ...]:
    """Return a record's values in the order of `COLUMNS`: seconds, bytes and words."""
    level = None if record.level is None else record.level.name.lower()
    kind = record.kind.name.lower()
    return (
        record.time, kind, record.pool, record.nbytes, record.address, record.stream, record.number, record.duration,
        record.lifetime, level, record.outcome, record.tag, record.task, record.thread,
        *(record.site or (None, None, None)), record.priority,
    )  # fmt: skip


def _encoded(write: Callable[[Records, TextIO], None], records: Records, file: BinaryIO) -> None:
    text = TextIOWrapper(file, encoding="utf-8", newline="")
    write(records, text)
    text.detach()


FORMATS: Final[dict[str, tuple[str, Callable[[Records, BinaryIO], None]]]] = {
    "torch": (".pickle", write_torch),
    "perfetto": (".perfetto.json", partial(_encoded, write_perfetto)),
    "csv": (".csv", partial(_encoded, write_csv)),
    "json": (".json", partial(_encoded, write_json)),
}
"""The ending of a file in each format, and the function that writes it."""
