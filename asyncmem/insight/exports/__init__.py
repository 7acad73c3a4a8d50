"""Records in formats that others read, one a file."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TextIO

from asyncmem.insight.exports.csv import write_csv
from asyncmem.insight.exports.json import write_json
from asyncmem.insight.exports.perfetto import write_perfetto

if TYPE_CHECKING:
    from collections.abc import Callable

    from asyncmem.insight.records import Records

FORMATS: Final[dict[str, tuple[str, Callable[[Records, TextIO], None]]]] = {
    "perfetto": (".perfetto.json", write_perfetto),
    "csv": (".csv", write_csv),
    "json": (".json", write_json),
}
"""How a file in each format is named at its end, and what writes it."""
