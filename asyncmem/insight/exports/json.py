"""Records as JSON: an object each, with all lines of their calls."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, TextIO

from asyncmem.insight.exports.rows import COLUMNS, row

if TYPE_CHECKING:
    from asyncmem.insight.records import Record, Records


def write_json(records: Records, file: TextIO) -> None:
    """Write an object: the pools, what is missing, and the records, one a line."""
    head = {
        "began": records.wall,
        "lost": records.lost,
        "note": records.note,
        "pools": [pool._asdict() for pool in records.names.pools],
    }
    file.write(json.dumps(head)[:-1] + ', "records": [')
    between = "\n"
    for record in records:
        file.write(between + json.dumps(_plain(record)))
        between = ",\n"
    file.write("\n]}\n")


def _plain(record: Record) -> dict[str, object]:
    found: dict[str, object] = dict(zip(COLUMNS, row(record), strict=True))
    found["frames"] = [site._asdict() for site in record.frames]
    return found
