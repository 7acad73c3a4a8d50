"""Records in formats that others read, one a file."""

from __future__ import annotations

from functools import partial
from io import TextIOWrapper
from typing import TYPE_CHECKING, BinaryIO, Final, TextIO

from asyncmem.insight.exports.csv import write_csv
from asyncmem.insight.exports.json import write_json
from asyncmem.insight.exports.perfetto import write_perfetto
from asyncmem.insight.exports.torch import write_torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from asyncmem.insight.records import Records


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
"""How a file in each format is named at its end, and what writes it."""
