"""Records as comma-separated values: one a line, below a line of names."""

from __future__ import annotations

import csv
from typing import TYPE_CHECKING, TextIO

from asyncmem.insight.exports.rows import COLUMNS, row

if TYPE_CHECKING:
    from asyncmem.insight.records import Records


def write_csv(records: Records, file: TextIO) -> None:
    """Write all records; what is not known is empty."""
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(COLUMNS)
    writer.writerows(map(row, records))
