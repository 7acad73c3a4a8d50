"""Exports say what the records say, in others' words."""

import asyncio
import csv
import io
import json
import pickle
from collections import defaultdict
from itertools import pairwise
from typing import Any

import pytest

from asyncmem import AsyncMemoryPool, OutOfMemoryError
from asyncmem.insight import Kind, Recording, Records, exports
from asyncmem.insight.exports import FORMATS

from .support import MIB

Event = dict[str, Any]


@pytest.fixture(scope="module")
def records() -> Records:
    """Several tasks that wait at once, another pool, a refusal, and a trim."""

    async def work() -> Records:
        async with (
            AsyncMemoryPool("simulated", name="narrow", limit="64 MiB") as pool,
            AsyncMemoryPool("simulated", name="wide") as other,
        ):
            with Recording(pool, other) as recording:  # of these alone: others of this process are other tests'
                held = []
                for nbytes in range(1000, 100_000, 777):
                    held.append(await other.allocate_async(nbytes))
                    if len(held) > 20:
                        held.pop(nbytes % 20).free()
                held.clear()
                kept = await pool.allocate_async("60 MiB")
                async with asyncio.TaskGroup() as group:
                    for _ in range(5):
                        group.create_task(take(pool))
                    await asyncio.sleep(0)  # they ask, and all wait
                    kept.free()
                with pytest.raises(OutOfMemoryError):
                    await pool.allocate_async("65 MiB")
                await pool.trim()
            return recording.records()

    return asyncio.run(work())


async def take(pool: AsyncMemoryPool) -> None:
    (await pool.allocate_async("20 MiB", tag='a, "b"\nc')).free()


def written(records: Records, to: str) -> str:
    return exported(records, to).decode()


def exported(records: Records, to: str) -> bytes:
    out = io.BytesIO()
    FORMATS[to][1](records, out)
    return out.getvalue()


def events(records: Records) -> list[Event]:
    found = json.loads(written(records, "perfetto"))
    assert found["displayTimeUnit"] == "ns"
    every: list[Event] = found["traceEvents"]
    return every


def test_slices_of_a_track_do_not_overlap(records: Records) -> None:
    """So they nest, however many waited at once; and every wait, growth and trim is one."""
    tracks: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    slices = [one for one in events(records) if one["ph"] == "X"]
    for one in slices:
        start = round(one["ts"] * 1000)
        tracks[one["pid"], one["tid"]].append((start, start + round(one["dur"] * 1000)))
    for spans in tracks.values():
        assert spans == sorted(spans)
        assert all(end <= start for (_, end), (start, _) in pairwise(spans))
    kinds = {"wait": Kind.WAITED, "grow": Kind.GREW, "trim": Kind.TRIMMED}
    for word, kind in kinds.items():
        those = records.of(kind)
        mine = [one for one in slices if one["cat"] == word]
        assert len(those) > 0
        assert sorted(one["args"]["bytes"] for one in mine) == sorted(one.nbytes for one in those)
        ends = sorted(round((one["ts"] + one["dur"]) * 1000) for one in mine)
        assert ends == sorted((those.rows["time_ns"] - records.began).tolist())
    waiting = {tid for pid, tid in tracks if pid == 1 and tid < 1000}
    assert len(waiting) >= 2


def test_names_are_given_to_processes_and_tracks(records: Records) -> None:
    """A process is a pool; every track that has a slice has a name."""
    every = events(records)
    named = {(one["pid"], one["tid"]) for one in every if one["ph"] == "M" and one["name"] == "thread_name"}
    assert named == {(one["pid"], one["tid"]) for one in every if one["ph"] == "X"}
    processes = [one["args"]["name"] for one in every if one["name"] == "process_name"]
    assert processes == ["pool narrow", "pool wide"]
    marks = [one["name"] for one in every if one["ph"] == "i"]
    assert marks.count("out of memory") == len(records.of(Kind.OUT_OF_MEMORY)) == 1
    assert all(one["ts"] >= 0 for one in every if "ts" in one)


def test_counters_are_what_is_live(records: Records) -> None:
    """After each change, for each pool, in bytes."""
    every = events(records)
    for process, name in enumerate(("narrow", "wide"), start=1):
        points = [one for one in every if one["ph"] == "C" and one["pid"] == process and one["name"] == "live"]
        assert [one["args"]["bytes"] for one in points] == records.in_pool(name).live()[1].tolist()
        reserved = [one for one in every if one["ph"] == "C" and one["pid"] == process and one["name"] == "reserved"]
        assert reserved[0]["args"]["bytes"] >= 2 * MIB


def test_long_counters_keep_their_peaks(records: Records, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of too many points the highest are kept, in their order."""
    monkeypatch.setattr(exports, "MOST_POINTS", 10)
    points = [one for one in events(records) if one["ph"] == "C" and one["pid"] == 2 and one["name"] == "live"]
    assert len(points) == 10
    assert [one["ts"] for one in points] == sorted(one["ts"] for one in points)
    assert max(one["args"]["bytes"] for one in points) == records.in_pool("wide").peak().nbytes


def test_csv_has_a_line_for_each_record(records: Records) -> None:
    """Also where a tag has commas, quotes and line ends; these are escaped, so that a line is a record."""
    text = written(records, "csv")
    assert text.count("\n") == 1 + len(records)
    rows = list(csv.DictReader(io.StringIO(text, newline="")))
    assert len(rows) == len(records)
    for row, record in zip(rows, records, strict=True):
        assert (row["kind"], int(row["nbytes"])) == (record.kind.name.lower(), record.nbytes)
        assert float(row["time"]) == record.time
        assert row["tag"] == (record.tag or "").replace("\n", "\\n")
        assert (row["file"], row["line"]) == (
            ("", "") if record.site is None else (record.site.file, str(record.site.line))
        )
    assert 'a, "b"\\nc' in {row["tag"] for row in rows}


def test_json_has_all_of_each_record(records: Records) -> None:
    """By its names, with the lines of its call and the pools."""
    found = json.loads(written(records, "json"))
    assert [pool["name"] for pool in found["pools"]] == ["narrow", "wide"]
    for one, record in zip(found["records"], records, strict=True):
        assert one["kind"] == record.kind.name.lower()
        plain = (
            "time",
            "nbytes",
            "address",
            "stream",
            "number",
            "duration",
            "lifetime",
            "outcome",
            "tag",
            "task",
            "pool",
        )
        assert all(one[name] == getattr(record, name) for name in plain)
        assert [tuple(site.values()) for site in one["frames"]] == [tuple(site) for site in record.frames]


@pytest.mark.parametrize("to", FORMATS)
def test_nothing_can_be_written(to: str) -> None:
    """An empty recording is a valid file."""
    with AsyncMemoryPool("simulated") as pool, Recording(pool) as recording:
        pass
    found = exported(recording.records(), to)
    empty = {"csv": lambda: found.count(b"\n") == 1, "torch": lambda: pickle.loads(found)["device_traces"] == [[]]}
    assert empty.get(to, lambda: json.loads(found))()
