"""A recording becomes a snapshot that PyTorch's viewer can take back, and that `asyncmem.replay` reads."""

import asyncio
import copy
import io
import pickle
import pickletools
import random
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from asyncmem import AsyncMemoryPool, OutOfMemoryError
from asyncmem.insight import Kind, PoolName, Recording, Records
from asyncmem.insight.exports.torch import AddressSpace, Extent, snapshot, tiles, write_torch
from asyncmem.insight.names import Names
from asyncmem.insight.reports.segments import segments
from asyncmem.replay import Op, Trace, from_snapshot, record

from .support import MIB, Program
from .viewer import OPCODES, rewind

# The program of these tests allocates from a running loop, by all doors.
pytestmark = pytest.mark.may_block


async def work(pool: AsyncMemoryPool, seed: int, *, keep: int = 1 << 18) -> tuple[Records, Trace]:
    """Record a random program from the middle to before its end, with memory that goes back now and then."""
    program = Program(pool, seed)
    await program.run(40)
    with record(pool) as recorder, Recording(pool, keep=keep) as recording:
        for _ in range(6):
            await program.run(40)
            while len(program.live) > 3:
                program.free_one()
            await pool.trim()
        await program.run(40)
    program.live.clear()
    return recording.records(), recorder.trace()


def recorded(seed: int, *, keep: int = 1 << 18, **options: Any) -> tuple[Records, Trace]:
    async def run() -> tuple[Records, Trace]:
        async with AsyncMemoryPool("simulated", **options) as pool:
            return await work(pool, seed, keep=keep)

    return asyncio.run(run())


def with_rows(records: Records, rows: NDArray[np.void], names: Names | None = None) -> Records:
    """Records like others, of other rows."""
    found = copy.copy(records)
    found.rows, found.names = rows, names or records.names
    return found


WAYS: dict[str, dict[str, Any]] = {
    "segments": {},
    "small segments": {"segment_size": 2 * MIB},
    "no cache": {"segments": "direct"},
    "pages": {"segments": "paged"},
}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("way", WAYS)
def test_every_step_can_be_taken_back(way: str, seed: int) -> None:
    """Blocks lie in segments and beside each other all the time; at the beginning is what was there before."""
    records, _ = recorded(seed, **WAYS[way])
    (device,) = rewind(snapshot(records))
    held = {one.address: (one.nbytes, False) for one in records.of(Kind.HELD)}
    assert held
    assert device.blocks == held


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("way", WAYS)
def test_a_replay_reads_back_what_happened(way: str, seed: int) -> None:
    """The same allocations and frees, in their order, of the same bytes, at the same times, on the same streams."""
    records, want = recorded(seed, **WAYS[way])
    found = from_snapshot(snapshot(records))
    held = len(records.of(Kind.HELD))
    assert history(found, held) == history(want, held)
    before = [sorted(one.nbytes[one.op == Op.ALLOCATE][:held]) for one in (found, want)]
    assert before[0] == before[1]
    assert found.peak_requested == want.peak_requested == records.peak().nbytes
    if way != "pages":
        assert found.peak_recorded >= records.most_reserved()  # what is told of late is put where it must have been
        there = {(one.address, one.nbytes) for one in segments(records, records.duration).segments}
        assert {(one["address"], one["total_size"]) for one in snapshot(records)["segments"]} == there
    assert found.note.startswith(f"{held} allocation")
    assert ";" not in found.note, "nothing had to be repaired"
    times = [one.time_us[one.op == Op.ALLOCATE][held:] for one in (found, want)]
    apart = np.diff(times[0]) - np.diff(times[1])
    assert abs(apart).max() <= 1


def history(trace: Trace, before: int) -> list[tuple[int, int, int, int]]:
    """What a trace says that the program did, with streams numbered as they come, without what was there before."""
    streams: dict[int, int] = {0: 0}
    born = [row for row in range(len(trace)) if trace.op[row] == Op.ALLOCATE]
    stream_of = {int(trace.id[row]): int(trace.stream[row]) for row in born}
    found = []
    for row in np.flatnonzero(trace.op <= Op.FREE)[before:].tolist():
        number = int(trace.id[row])
        known = number >= before  # those before may have been put in another order
        stream = streams.setdefault(stream_of[number], len(streams)) if known else -1
        found.append((int(trace.op[row]), number if known else -1, int(trace.nbytes[row]), stream))
    return found


def test_the_file_has_what_the_viewers_unpickler_knows() -> None:
    """Plain data of a protocol that it takes, and lists of lines that are the same are there once."""
    records, _ = recorded(1)
    out = io.BytesIO()
    write_torch(records, out)
    found = list(pickletools.genops(out.getvalue()))
    assert {code.name for code, _, _ in found} <= OPCODES
    assert [argument for code, argument, _ in found if code.name == "PROTO"] == [4]
    assert max(len(argument) for code, argument, _ in found if code.name == "LONG1" for argument in [bytes(8)]) <= 8
    assert pickle.loads(out.getvalue()) == snapshot(records)
    lists = {id(one["frames"]) for one in snapshot(records)["device_traces"][0] if one["action"] == "alloc"}
    assert len(lists) <= len(np.unique(records.rows["site"]))


def test_entries_have_lines_and_tags_and_streams() -> None:
    """Innermost line first; the default stream is 0, and those of different pools are different ones."""

    async def run() -> Records:
        async with AsyncMemoryPool("simulated") as one, AsyncMemoryPool("simulated", limit="8 MiB") as other:
            with Recording(one, other, frames=2) as recording:
                for pool in (one, other):
                    take(pool, None).free()
                    take(pool, pool.device.create_stream()).free()
                with pytest.raises(OutOfMemoryError):
                    await other.allocate_async("9 MiB")
            return recording.records()

    found = snapshot(asyncio.run(run()))
    rewind(found)
    entries = [one for entries in found["device_traces"] for one in entries]
    allocated = [one for one in entries if one["action"] == "alloc"]
    first = take.__code__.co_firstlineno + 1
    assert {one["user_metadata"] for one in allocated} == {"mine"}
    assert all((one["frames"][0]["line"], one["frames"][0]["name"]) == (first, "take") for one in allocated)
    assert all(one["frames"][0]["filename"] == __file__ and len(one["frames"]) == 2 for one in allocated)
    assert [one["stream"] for one in allocated][::2] == [0, 0]
    assert len({one["stream"] for one in allocated}) == 3
    (refused,) = (one for one in entries if one["action"] == "oom")
    assert (refused["size"], refused["device_free"]) == (9 * MIB, 8 * MIB - most_of(found, 1))


def take(pool: AsyncMemoryPool, stream: object) -> Any:
    return pool.allocate(1000, tag="mine", stream=stream)


def most_of(found: dict[str, Any], device: int) -> int:
    return sum(one["total_size"] for one in found["segments"] if one["device"] == device)


@pytest.mark.parametrize(
    ("way", "devices", "numbers"),
    [
        ("segments", ("cuda:1", "cuda:1"), (1, 1)),
        ("segments", ("simulated", "cuda:1"), (2, 1)),
        ("segments", ("host", "simulated"), (0, 1)),
        ("pages", ("cuda:0", "cuda:0"), (0, 1)),
    ],
)
def test_devices_have_their_numbers(way: str, devices: tuple[str, str], numbers: tuple[int, int]) -> None:
    """Pools of a CUDA device share its own; each of another kind, or by pages, has the next one behind those."""
    one, _ = recorded(1)
    other, _ = recorded(2, **WAYS[way])
    further = other.rows.copy()
    further["pool"] = 1
    further["address"] += np.uint64(1 << 50) * (further["address"] != 0).astype(np.uint64)
    further["time_ns"] += one.began - other.began  # so that what was there before begins together
    rows = np.concatenate((one.rows, further))
    rows = rows[np.argsort(rows["time_ns"], kind="stable")]
    names = replace(one.names, pools=[PoolName(f"of {device}", device, 1 << 40) for device in devices])
    found = snapshot(with_rows(one, rows, names))
    assert {number for number, entries in enumerate(found["device_traces"]) if entries} == set(numbers)
    assert {(one["segment_pool_id"], one["device"]) for one in found["segments"]} == {
        ((0, 0), numbers[0]),
        ((0, 1), numbers[1]),
    }
    rewind(found)


@pytest.mark.parametrize("seed", range(20))
def test_rows_that_come_late_are_put_right(seed: int) -> None:
    """A segment may be told of after the first block in it, and its end after it has come again."""
    records, _ = recorded(seed % 2, segments="direct")
    draw = random.Random(seed)
    places = np.arange(len(records), dtype=float)
    moved = np.flatnonzero(np.isin(records.rows["kind"], (Kind.GREW, Kind.TRIMMED)) & (records.rows["time_ns"] > 0))
    first = int(np.flatnonzero(records.rows["kind"] < Kind.HELD)[0])
    for at in moved[moved > first].tolist():
        places[at] += draw.choice((0, 0, 1.5, 2.5, 7.5))
    rows = records.rows[np.argsort(places, kind="stable")]
    rows["time_ns"] = np.sort(rows["time_ns"])
    found = snapshot(with_rows(records, rows))
    (device,) = rewind(found)
    assert device.blocks == {one.address: (one.nbytes, False) for one in records.of(Kind.HELD)}
    asked = [one["size"] for one in found["device_traces"][0] if one["action"] == "alloc"]
    assert asked == [one.nbytes for one in records.of(Kind.ALLOCATED)]
    if seed:
        assert not np.array_equal(rows, records.rows)


def test_what_is_found_later_to_have_been_there_is_taken_then() -> None:
    """Of a recording that has lost rows in its middle: what lay there before is no contradiction."""
    records, _ = recorded(0)
    taken = np.flatnonzero(records.rows["kind"] == Kind.ALLOCATED)
    rows = records.rows.copy()
    rows["kind"][taken[::3]] = Kind.HELD
    (device,) = rewind(snapshot(with_rows(records, rows)))
    assert device.blocks == {one.address: (one.nbytes, False) for one in records.of(Kind.HELD)}


def test_a_recording_whose_beginning_is_lost_lies_on_ranges() -> None:
    """Where its segments were nobody knows; all that is left can be taken back."""
    records, _ = recorded(3, keep=200)
    assert records.lost
    (device,) = rewind(snapshot(records))
    held = {one.address: (one.nbytes, False) for one in records.of(Kind.HELD)}
    assert device.blocks
    assert device.blocks.items() <= held.items()


# -- an address space by itself -------------------------------------------------------------------------------------

SEGMENT = Extent(2 * MIB, 2 * MIB, 0)
SAID: dict[str, Any] = {"stream": 0, "frames": [], "compile_context": "N/A", "user_metadata": ""}


def space(*known: Extent) -> AddressSpace:
    found = AddressSpace(0)
    found.known[0] = list(known)
    return found


def block(offset: int, nbytes: int = 1024) -> Extent:
    return Extent(SEGMENT.address + offset, nbytes, 0)


def actions(one: AddressSpace) -> list[str]:
    rewind({"segments": list(one.segments()), "device_traces": [one.entries]})
    return [entry["action"] for entry in one.entries]


def test_an_end_that_is_told_behind_the_next_beginning_ends_nothing() -> None:
    """The segment has blocks by then, so it has come again."""
    one = space(SEGMENT, SEGMENT)
    one.grow(SEGMENT)
    one.grow(SEGMENT)
    one.take(block(0), SAID)
    one.trim(SEGMENT)
    assert actions(one) == ["segment_alloc", "alloc"]


def test_a_block_where_no_segment_is_has_the_next_one_or_the_last() -> None:
    """Of those that lie there."""
    later = Extent(SEGMENT.address, 4 * MIB, 0)
    one = space(Extent(8 * MIB, MIB, 0), SEGMENT, later)
    one.grow(Extent(8 * MIB, MIB, 0))
    one.take(block(0), SAID)
    one.free(block(0))
    one.grow(SEGMENT)
    one.trim(SEGMENT)
    one.take(block(0), SAID)
    one.free(block(0))
    one.grow(later)
    one.trim(later)
    one.take(block(512), SAID)
    grown = [entry["size"] for entry in one.entries if entry["action"] == "segment_alloc"]
    assert grown == [MIB, 2 * MIB, 4 * MIB, 4 * MIB]
    actions(one)


def test_a_segment_takes_the_place_of_what_lay_there() -> None:
    """With its blocks, whose ends nobody told."""
    other = Extent(SEGMENT.address + MIB, 2 * MIB, 0)
    one = space(SEGMENT, other)
    one.grow(SEGMENT)
    one.take(block(0), SAID)
    one.grow(other)
    ends = ["free_requested", "free_completed", "segment_free"]
    assert actions(one) == ["segment_alloc", "alloc", *ends, "segment_alloc"]


def test_a_block_takes_the_place_of_what_lay_there() -> None:
    """Wherever that began; of what was there before, only one can have been."""
    one = space(SEGMENT)
    one.grow(SEGMENT)
    one.take(block(0), SAID)
    one.take(block(512), SAID)
    assert actions(one) == ["segment_alloc", "alloc", "free_requested", "free_completed", "alloc"]
    other = space(SEGMENT)
    other.grow(SEGMENT, before=True)
    other.take(block(0), SAID, before=True)
    other.take(block(512), SAID, before=True)
    assert actions(other) == []


def test_tiles_do_not_overlap() -> None:
    """A block has its granules, as far as there is room for them."""
    held = [(Extent(0, 300, 0), SAID), (Extent(400, 600, 0), SAID), (Extent(2000, 1, 0), SAID)]
    found = [(one["address"], one["size"], one["requested_size"]) for one in tiles(Extent(0, 2100, 0), held)]
    assert found == [(0, 400, 300), (400, 1024, 600), (1424, 576, 0), (2000, 100, 1)]


def test_pages_in_which_nothing_lay_are_nowhere() -> None:
    """Only where buffers were is known, and what lies side by side is one range."""
    records, _ = recorded(1, segments="paged")
    found = snapshot(records)["segments"]
    assert all(one["address"] + one["total_size"] < other["address"] for one, other in pairwise(found))
    rows = records.rows[np.isin(records.rows["kind"], (Kind.GREW, Kind.TRIMMED))]
    assert len(rows)
    assert snapshot(with_rows(records, rows))["segments"] == []
