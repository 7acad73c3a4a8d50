"""Records for the viewers of traces, in Chrome's JSON: ui.perfetto.dev opens it.

Each pool is a process. Live and reserved bytes are counters; waits, growth and trims are slices, on as many tracks as
it takes that no two of a track overlap; refusals and changes of pressure are marks.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING, Any, Final, TextIO, TypeAlias

import numpy as np

from asyncmem.core import Kind
from asyncmem.figures import format_size
from asyncmem.text import printable, to_json

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from asyncmem.insight.records import Record, Records

MOST_POINTS: Final = 100_000
"""Points of a counter: of more, the highest of so many parts are kept."""

_SLICES: Final = {Kind.WAITED: "wait", Kind.GREW: "grow", Kind.TRIMMED: "trim"}
_MARKS: Final = {Kind.OUT_OF_MEMORY: "out of memory", Kind.PRESSURE: "pressure"}
_TRACKS: Final = 1000
"""Numbers of tracks that a kind of slice may have."""

Event: TypeAlias = dict[str, Any]


def write_perfetto(records: Records, file: TextIO) -> None:
    """Write counters, slices and marks of all pools; lives of single buffers are left out."""
    file.write('{"displayTimeUnit": "ns", "traceEvents": [')
    between = "\n"
    for event in _events(records):
        file.write(between + to_json(event))
        between = ",\n"
    file.write("\n]}\n")


def _events(records: Records) -> Iterator[Event]:
    processes: dict[str, int] = {}
    for number, pool in enumerate(records.names.pools, 1):
        processes.setdefault(pool.name, number)
    of = np.array([processes[pool.name] for pool in records.names.pools], np.int64)[records.rows["pool"]]
    order = np.argsort(of, kind="stable")
    rows, of = records.rows[order], of[order]
    for name, process in sorted(processes.items()):
        first, end = of.searchsorted([process, process + 1])
        yield from _of_pool(records.with_rows(rows[first:end]), name, process)


def _of_pool(records: Records, name: str, process: int) -> Iterator[Event]:
    yield {"ph": "M", "name": "process_name", "pid": process, "tid": 0, "args": {"name": f"pool {printable(name)}"}}
    for counter, (times, values) in (("live", records.live()), ("reserved", records.reserved())):
        for time, value in _thinned(times, values):
            yield {"ph": "C", "name": counter, "pid": process, "ts": time / 1e3, "args": {"bytes": value}}
    for at, (kind, word) in enumerate(_SLICES.items()):
        slices = records.grown() if kind is Kind.GREW else records.of(kind)
        yield from _slices(slices, word, process, at * _TRACKS + 1)
    for record in records.of(*_MARKS):
        word = _MARKS[record.kind]
        args = _args(record)
        yield {"ph": "i", "s": "p", "name": word, "pid": process, "tid": 0, "ts": record.time * 1e6, "args": args}


def _thinned(times: NDArray[np.int64], values: NDArray[np.int64]) -> Iterator[tuple[int, int]]:
    if len(times) > MOST_POINTS:
        parts = np.array_split(np.arange(len(times)), MOST_POINTS)
        kept = [int(part[np.argmax(values[part])]) for part in parts]
        times, values = times[kept], values[kept]
    yield from zip(times.tolist(), values.tolist(), strict=True)


def _slices(records: Records, word: str, process: int, first: int) -> Iterator[Event]:
    """Lay slices on tracks: each on one whose last slice is over."""
    # In whole nanoseconds, so that one begins where another ends and not before.
    ends = records.rows["time_ns"] - records.began
    starts = np.maximum(ends - records.rows["span_ns"], 0)
    spans = ends - starts
    free: list[tuple[int, int]] = []  # when a track's last slice ends, and which track it is
    tracks = 0
    for at in np.argsort(starts, kind="stable").tolist():
        start, span = int(starts[at]), int(spans[at])
        if free and free[0][0] <= start:
            _, track = heapq.heappop(free)
        else:
            track, tracks = tracks, tracks + 1
            label = {"name": f"{word} {tracks}"}
            yield {"ph": "M", "name": "thread_name", "pid": process, "tid": first + track, "args": label}
        heapq.heappush(free, (start + span, track))
        record = records[at]
        yield {
            "ph": "X", "cat": word, "name": f"{word} {format_size(record.nbytes)}", "pid": process,
            "tid": first + track, "ts": start / 1e3, "dur": span / 1e3, "args": _args(record),
        }  # fmt: skip


def _args(record: Record) -> dict[str, object]:
    named = {"outcome": record.outcome, "tag": record.tag, "task": record.task, "line": record.site}
    return {"bytes": record.nbytes} | {name: printable(str(value)) for name, value in named.items() if value}
