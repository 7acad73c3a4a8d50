"""Records in formats that other programs read: CSV, JSON, and JSON for viewers of traces; PyTorch's in a module."""

from __future__ import annotations

import csv
import heapq
import re
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from io import TextIOWrapper
from typing import Any, BinaryIO, Final, TextIO, TypeAlias

import numpy as np
from numpy.typing import NDArray

from asyncmem.core import Kind
from asyncmem.figures import format_size
from asyncmem.insight.exports.torch import write_torch
from asyncmem.insight.records import Record, Records
from asyncmem.text import printable, to_json

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
    writer.writerows(map(_cell, _row(record).values()) for record in records)


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
    rows = (_row(record) | {"frames": [site._asdict() for site in record.frames]} for record in records)
    _write_lines(file, head, "records", rows)


def _write_lines(file: TextIO, head: dict[str, object], name: str, items: Iterable[dict[str, Any]]) -> None:
    """Write an object that ends with a list, one item a line."""
    file.write(f'{to_json(head)[:-1]}, "{name}": [')
    between = "\n"
    for item in items:
        file.write(between + to_json(item))
        between = ",\n"
    file.write("\n]}\n")


def _row(record: Record) -> dict[str, Any]:
    """Return a record's values by `COLUMNS`: seconds, bytes and words."""
    file, line, function = record.site or (None, None, None)
    level = None if record.level is None else record.level.name.lower()
    words = {"kind": record.kind.name.lower(), "level": level, "file": file, "line": line, "function": function}
    values = record._asdict() | words
    return {name: values[name] for name in COLUMNS}


# -- for viewers of traces ---------------------------------------------------------------------------------------------

MOST_POINTS: Final = 100_000
"""Points of a counter: of more, the highest of so many parts are kept."""

_SLICES: Final = {Kind.WAITED: "wait", Kind.GREW: "grow", Kind.TRIMMED: "trim"}
_MARKS: Final = {Kind.OUT_OF_MEMORY: "out of memory", Kind.PRESSURE: "pressure"}
_TRACKS: Final = 1000
"""Numbers of tracks that a kind of slice may have."""

Event: TypeAlias = dict[str, Any]


def write_perfetto(records: Records, file: TextIO) -> None:
    """Write counters, slices and marks of all pools in Chrome's JSON, which ui.perfetto.dev opens.

    Each pool is a process. Live and reserved bytes are counters; waits, growth and trims are slices, on as many tracks
    as it takes that no two of a track overlap; refusals and changes of pressure are marks. Lives of single buffers are
    left out.
    """
    _write_lines(file, {"displayTimeUnit": "ns"}, "traceEvents", _events(records))


def _events(records: Records) -> Iterator[Event]:
    processes: dict[str, int] = {}
    for number, pool in enumerate(records.names.pools, 1):
        processes.setdefault(pool.name, number)
    of = np.array([processes[pool.name] for pool in records.names.pools], np.int64)[records.rows["pool"]]
    order = np.argsort(of, kind="stable")
    rows, of = records.rows[order], of[order]
    for name, process in processes.items():
        first, end = of.searchsorted([process, process + 1])
        for event in _of_pool(records.with_rows(rows[first:end]), name):
            yield event | {"pid": process}


def _of_pool(records: Records, name: str) -> Iterator[Event]:
    yield {"ph": "M", "name": "process_name", "tid": 0, "args": {"name": f"pool {printable(name)}"}}
    for counter, (times, values) in (("live", records.live()), ("reserved", records.reserved())):
        for time, value in _thinned(times, values):
            yield {"ph": "C", "name": counter, "ts": time / 1e3, "args": {"bytes": value}}
    for at, (kind, word) in enumerate(_SLICES.items()):
        slices = records.grown() if kind is Kind.GREW else records.of(kind)
        yield from _slices(slices, word, at * _TRACKS + 1)
    for record in records.of(*_MARKS):
        word, args = _MARKS[record.kind], _args(record)
        yield {"ph": "i", "s": "p", "name": word, "tid": 0, "ts": record.time * 1e6, "args": args}


def _thinned(times: NDArray[np.int64], values: NDArray[np.int64]) -> Iterator[tuple[int, int]]:
    if len(times) > MOST_POINTS:
        parts = np.array_split(np.arange(len(times)), MOST_POINTS)
        kept = [int(part[np.argmax(values[part])]) for part in parts]
        times, values = times[kept], values[kept]
    yield from zip(times.tolist(), values.tolist(), strict=True)


def _slices(records: Records, word: str, first: int) -> Iterator[Event]:
    """Lay slices on tracks: each on one whose last slice is over."""
    # In whole nanoseconds, so that one begins where another ends and not before.
    ends = records.rows["time_ns"] - records.began
    starts = np.maximum(ends - records.rows["span_ns"], 0)
    free: list[tuple[int, int]] = []  # when a track's last slice ends, and which track it is
    tracks = 0
    for at in np.argsort(starts, kind="stable").tolist():
        start, end = int(starts[at]), int(ends[at])
        if free and free[0][0] <= start:
            _, track = heapq.heappop(free)
        else:
            track, tracks = first + tracks, tracks + 1
            yield {"ph": "M", "name": "thread_name", "tid": track, "args": {"name": f"{word} {tracks}"}}
        heapq.heappush(free, (end, track))
        record = records[at]
        yield {
            "ph": "X", "cat": word, "name": f"{word} {format_size(record.nbytes)}", "tid": track, "ts": start / 1e3,
            "dur": (end - start) / 1e3, "args": _args(record),
        }  # fmt: skip


def _args(record: Record) -> dict[str, object]:
    named = {"outcome": record.outcome, "tag": record.tag, "task": record.task, "line": record.site}
    return {"bytes": record.nbytes} | {name: printable(str(value)) for name, value in named.items() if value}


# ----------------------------------------------------------------------------------------------------------------------


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
