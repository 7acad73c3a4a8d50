"""Pictures have the columns that adding records up one by one gives, and lose no extreme of many."""

import asyncio
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from asyncmem import AsyncMemoryPool, OutOfMemoryError, PoolTimeout, tag
from asyncmem.core import Kind
from asyncmem.insight import Recording, Records, pictures, reports
from asyncmem.insight.names import Names, PoolName, Site
from asyncmem.insight.reports.segments import CELLS, MOST_ROWS, memory_map
from asyncmem.insight.reports.timeline import MOST_TAGS, NO_TAG, OTHERS, LiveByTag, live_by_tag, marks
from asyncmem.insight.rows import ROW

from .support import MIB, Program

MAKERS = {Kind.ALLOCATED, Kind.HELD}
TAGS = [f"tag {number}" for number in range(MOST_TAGS + 4)]


@pytest.fixture(scope="module")
def records() -> Records:
    """A random program with more tags than there are colours, on a pool that was in use before."""

    async def work() -> Records:
        async with AsyncMemoryPool("simulated", name="mine", limit="256 MiB") as pool:
            program = Program(pool, 11)
            await program.run(30)
            with Recording(pool, frames=4) as recording:
                for name in TAGS:
                    with tag(name):
                        await program.run(40)
                await program.run(40)
                with pytest.raises(OutOfMemoryError):
                    await pool.allocate_async("1 GiB")
            program.live.clear()
            return recording.records()

    return asyncio.run(work())


def made(rows: list[tuple[Kind, int, int, int]], *, span: int = 0, tags: int = 0) -> Records:
    """Records of a pool: kind, time in nanoseconds, allocation and bytes of each, which lies at a place of its own."""
    table = np.zeros(len(rows), ROW)
    for at, (kind, time, number, nbytes) in enumerate(rows):
        table[at]["kind"], table[at]["time_ns"], table[at]["number"], table[at]["nbytes"] = kind, time, number, nbytes
        table[at]["address"], table[at]["span_ns"] = (number + 1) * MIB, span
        table[at]["tag"] = number % tags + 1 if tags else 0
    names = Names(
        places=[None], sites=[(0, 0)], tasks=[""], tags=["", *(f"tag {number}" for number in range(tags))],
        threads=[None], pools=[PoolName("made", "none", 1 << 40)],
    )  # fmt: skip
    return Records(table, names, began=0, wall=0.0, ended=int(table["time_ns"].max(initial=0)))


def value_at(shown: LiveByTag, values: np.ndarray, time: float) -> int:
    """What a picture shows at a time: what holds from the last moment before."""
    return int(values[np.searchsorted(shown.times, time, side="right") - 1])


def test_every_moment_of_a_short_program_is_shown(records: Records) -> None:
    """Live bytes by tag at each allocation and free, exactly, with all others together."""
    shown = live_by_tag(records, parts=10_000_000)
    live: Counter[str] = Counter()
    known = {band.tag for band in shown.bands if band.tag}
    untagged = NO_TAG if NO_TAG in {band.name for band in shown.bands} else OTHERS
    assert len(shown.bands) == MOST_TAGS + 1
    moments = [one for one in records if one.kind in MAKERS or one.kind is Kind.FREED]
    for record, following in pairwise([*moments, moments[-1]]):
        name = record.tag if record.tag in known else untagged if record.tag is None else OTHERS
        live[name] += record.nbytes if record.kind in MAKERS else -record.nbytes
        if record is following or following.time > record.time:
            assert value_at(shown, shown.live, record.time) == live.total()
            for band in shown.bands:
                assert value_at(shown, band.nbytes, record.time) == live[band.name]
    assert (shown.times[0], shown.live[0]) == (0, 0)
    assert shown.times[-1] == shown.seconds == records.duration
    assert shown.live[-1] == live.total()


@pytest.mark.parametrize("parts", [1, 7, 100])
def test_no_extreme_of_a_part_is_lost(records: Records, parts: int) -> None:
    """Whatever the program did between two columns of a screen, its highest and lowest are among what is drawn."""
    shown = live_by_tag(records, parts)
    whole = live_by_tag(records, parts=10_000_000)
    names = {band.name: band.nbytes for band in whole.bands}
    assert shown.live.max() == records.peak().nbytes
    assert records.peak().time in shown.times.tolist()
    for edge, following in pairwise(np.linspace(0, records.duration, parts + 1).tolist()):
        every = (whole.times >= edge) & (whole.times < following)
        every[0] = every[-1] = False
        drawn = (shown.times >= edge) & (shown.times < following)
        if every.any():
            for band in shown.bands:
                values = band.nbytes[drawn]
                assert values.max() >= names[band.name][every].max()
                assert values.min() <= names[band.name][every].min()
            assert shown.live[drawn].max() >= whole.live[every].max()
    assert len(shown.times) <= parts * (2 * (len(shown.bands) + 1) + 1) + 2
    sums = sum(band.nbytes for band in shown.bands)
    assert np.array_equal(sums, shown.live)


def test_a_spike_among_many_is_drawn() -> None:
    """One buffer, held for a nanosecond in a second of steady work."""
    steady = [(Kind.ALLOCATED if at % 2 == 0 else Kind.FREED, at * 10_000, at // 2, 1000) for at in range(100_000)]
    spike = [(Kind.ALLOCATED, 700_000_001, 60_000, 5 * MIB), (Kind.FREED, 700_000_002, 60_000, 5 * MIB)]
    rows = sorted([*steady, *spike], key=lambda one: one[1])
    shown = live_by_tag(made(rows), parts=50)
    assert shown.live.max() == 5 * MIB + 1000
    assert shown.times[shown.live.argmax()] == pytest.approx(0.700000001)
    assert len(shown.times) < 500


def test_what_a_part_ends_with_holds_until_the_next() -> None:
    """Neither its highest nor its lowest is taken for it."""
    sizes = ((1, 10), (2, 50), (3, -30), (90, 5))
    rows = [(Kind.ALLOCATED if nbytes > 0 else Kind.FREED, at, at, abs(nbytes)) for at, nbytes in sizes]
    shown = live_by_tag(made(rows), parts=2)
    assert [value_at(shown, shown.live, ns / 1e9) for ns in (1, 2, 40, 90)] == [10, 60, 30, 35]


def test_the_reserved_line_is_that_of_the_records(records: Records) -> None:
    """With its highest, what was had in the end, and the limit."""
    shown = live_by_tag(records, parts=10_000_000)  # so that each growth is in a part of its own
    assert shown.reserved.max() == reports.summary(records).most_reserved
    assert shown.limit == 256 * MIB
    reserved = 0
    grown = list(records.of(Kind.GREW, Kind.TRIMMED))
    for record, following in pairwise([*grown, grown[-1]]):
        reserved += record.nbytes if record.kind is Kind.GREW else -record.nbytes
        at = np.searchsorted(shown.reserved_times, record.time, side="right") - 1
        if following is record or following.time > record.time:
            assert shown.reserved[at] == reserved
    assert shown.reserved[-1] == reserved


def test_marks_have_all_that_happened(records: Records) -> None:
    """Growth, refusals: as many as there were, with their bytes; what was there before did not grow then."""
    shown = marks(records.grown(), parts=3)
    begin = records[0].time
    grew = [one for one in records if one.kind is Kind.GREW and one.time > begin]
    assert shown.counts.sum() == len(grew) < len(records.of(Kind.GREW))
    assert shown.nbytes.sum() == sum(one.nbytes for one in grew)
    assert shown.largest.max() == max(one.nbytes for one in grew)
    assert len(shown.starts) <= 3
    (refused,) = [one for one in records if one.kind is Kind.OUT_OF_MEMORY]
    shown = marks(records.of(Kind.OUT_OF_MEMORY))
    assert shown.starts.tolist() == shown.ends.tolist() == [refused.time]
    assert shown.nbytes.tolist() == [1 << 30]


def test_growth_is_marked_also_where_it_is_the_first_that_happened() -> None:
    """A program's first allocation grows its pool; that took some time, which what was there before did not."""
    row = (Kind.GREW, 50, 0, MIB)
    assert marks(made([row], span=5).grown()).nbytes.tolist() == [MIB]
    assert marks(made([row]).grown()).nbytes.tolist() == []


def test_waits_that_touch_are_one_mark() -> None:
    """From the first one's beginning to the last one's end; a gap that can be seen parts them."""
    ends = [100, 120, 130, 500, 900, 1000]
    shown = marks(made([(Kind.WAITED, end, 0, 1) for end in ends], span=50), parts=100)
    assert (shown.starts * 1e9).round().tolist() == [50, 450, 850, 950]
    assert (shown.ends * 1e9).round().tolist() == [130, 500, 900, 1000]
    assert shown.counts.tolist() == [3, 1, 1, 1]
    assert (shown.longest * 1e9).round().tolist() == [50] * 4
    within = [(Kind.WAITED, 120, 0, 1), (Kind.WAITED, 140, 0, 1), (Kind.WAITED, 1000, 0, 1)]
    records = made(within, span=10)
    rows = records.rows.copy()
    rows["span_ns"][2] = 990
    long = marks(Records(rows, records.names, began=0, wall=0.0, ended=records.ended), parts=1000)
    assert (long.counts.tolist(), long.ends.tolist(), long.longest.tolist()) == ([3], [1e-6], [0.99e-6])
    together = marks(made([(Kind.WAITED, end, 0, 1) for end in ends], span=50), parts=1)
    assert together.counts.tolist() == [6]


def test_the_map_has_every_buffer_and_its_holes(records: Records) -> None:
    """At the peak: bytes and buffers of each segment, and blocks that lie where its pieces lie."""
    shown = memory_map(records)
    found = reports.segments(records).segments
    assert shown.time == records.peak().time
    wanted = [(*one[:4], one.live, one.largest_hole) for one in found]
    assert [(*one[:4], one.live, one.largest_hole) for one in shown.rows] == wanted
    cell = max(one.nbytes for one in found) // CELLS
    for row, segment in enumerate(found):
        blocks = [one for one in shown.blocks if one.row == row]
        assert sum(one.nbytes for one in blocks) == segment.live
        assert sum(one.buffers for one in blocks) == len(segment.pieces)
        large = {piece for piece in segment.pieces if piece.nbytes >= cell}
        assert {(one.offset, one.offset + one.nbytes, one.tag) for one in large} <= {one[1:4] for one in blocks}
        assert all(any(one.left <= piece.offset <= one.right for one in blocks) for piece in segment.pieces)
        assert all(one.nbytes <= one.right - one.left for one in blocks)


def test_a_map_of_very_many_buffers_stays_small() -> None:
    """The holes that a screen could show are there, also between buffers that it could not."""
    count = 100_000
    rows = [(Kind.GREW, 0, 0, count * MIB)]
    rows += [(Kind.ALLOCATED, 1, at, MIB // 2) for at in range(count) if not 40_000 <= at < 60_000]
    shown = memory_map(made(rows, tags=30))
    assert len(shown.blocks) <= CELLS
    assert sum(one.buffers for one in shown.blocks) == 80_000
    assert all(one.nbytes == one.buffers * MIB // 2 for one in shown.blocks)
    assert {one.tags for one in shown.blocks} == {30}
    assert not [one for one in shown.blocks if one.left < 60_000 * MIB and one.right > 40_000 * MIB]
    assert shown.rows[0].largest_hole == 20_000 * MIB + MIB // 2


def test_buffers_that_are_shown_as_one_have_the_colour_of_most() -> None:
    """Of most bytes, not of the first or of most buffers."""
    rows = [(Kind.GREW, 0, 0, 10_000 * MIB), (Kind.ALLOCATED, 1, 0, 4096)]
    rows += [(Kind.ALLOCATED, 1, at, nbytes) for at, nbytes in ((1, MIB), (4, MIB // 2))]
    rows += [(Kind.ALLOCATED, 1, at, 4096) for at in (2, 5, 8)]
    rows += [(Kind.ALLOCATED, 1, 5000, 512)]
    (first, second) = memory_map(made(rows, tags=3)).blocks
    assert first[1:] == (0, 8 * MIB + 4096, "tag 1", 3, 6, MIB + MIB // 2 + 4 * 4096)
    assert second[3:] == ("tag 2", 1, 1, 512)


def test_a_map_of_very_many_segments_has_the_largest() -> None:
    """In the order of their addresses; the others are counted."""
    sizes = [MIB + (at * 7919 % 100) * 4096 for at in range(100)]
    found = reports.segments(made([(Kind.GREW, 0, at + 1, size) for at, size in enumerate(sizes)])).segments
    assert len(found) == 100
    shown = memory_map(made([(Kind.GREW, 0, at + 1, size) for at, size in enumerate(sizes)]))
    assert sorted((one.nbytes for one in shown.rows), reverse=True) == sorted(sizes, reverse=True)[:MOST_ROWS]
    assert [one.address for one in shown.rows] == sorted(one.address for one in shown.rows)
    assert (shown.left_out, shown.left_out_bytes) == (60, sum(sorted(sizes)[:60]))


def icicle(records: Records, name: str) -> dict[str, Any]:
    """What a page has of an icicle."""
    return pictures._data(records, 100)[name]


def cells(shown: dict[str, Any], depth: int = 0) -> Iterator[tuple[int, dict[str, Any]]]:
    """Go through the lines of an icicle, each with its depth: no line has less than what it called."""
    assert sum(one["weight"] for one in shown["calls"]) <= shown["weight"] * (1 + 1e-9)
    assert sum(one["requests"] for one in shown["calls"]) <= shown["requests"]
    for one in shown["calls"]:
        yield depth, one
        yield from cells(one, depth + 1)


def test_the_icicle_at_the_peak_is_the_tree(records: Records) -> None:
    """Each line as wide as its bytes; small ones of a caller together, so that none is lost."""
    shown = icicle(records, "peak")
    tree = reports.tree(records)
    assert (shown["weight"], shown["requests"]) == (tree.nbytes, tree.buffers)
    assert sum(one["weight"] for one in shown["calls"]) == tree.nbytes
    want: Counter[tuple[int, str, int, int]] = Counter()
    waiting = [(0, node) for node in tree.calls]
    while waiting:
        depth, node = waiting.pop()
        if node.nbytes >= tree.nbytes / 1000:
            want[depth, node.name, node.nbytes, node.buffers] += 1
            waiting += [(depth + 1, one) for one in node.calls]
    lines = [(depth, one) for depth, one in cells(shown) if "smaller line" not in one["name"]]
    assert Counter((depth, one["name"], one["weight"], one["requests"]) for depth, one in lines) == want


def test_small_lines_are_shown_together() -> None:
    """As so many, with what they come to."""
    count = 3000
    table = np.zeros(count + 1, ROW)
    table["kind"], table["nbytes"], table["number"] = Kind.ALLOCATED, 10, np.arange(count + 1)
    table["site"] = np.arange(1, count + 2)
    table[count]["nbytes"] = 10 * count
    names = Names(
        places=[None, *(Site("many.py", line, "f") for line in range(count)), Site("one.py", 1, "g")],
        sites=[(0, 0), *((at, 0) for at in range(1, count + 2))],
        tasks=[""], tags=[""], threads=[None], pools=[PoolName("made", "none", 1)],
    )  # fmt: skip
    shown = icicle(Records(table, names, began=0, wall=0.0, ended=0), "leaked")
    assert [(one["name"], one["weight"], one["requests"]) for one in shown["calls"]] == [
        ("one.py:1 (g)", 30_000, 1),
        ("3,000 smaller lines", 30_000, 3000),
    ]


def test_a_line_has_the_colour_of_the_tag_that_has_most_of_it() -> None:
    """Of bytes, not of buffers: the same as the tag's band."""
    rows = [(Kind.ALLOCATED, 1, 0, 4096), (Kind.ALLOCATED, 2, 1, MIB), (Kind.ALLOCATED, 3, 2, 4096)]
    data = pictures._data(made(rows, tags=2), 100)
    (line,) = data["peak"]["calls"]
    (band,) = [one for one in data["timeline"]["bands"] if one["name"] == "tag 1"]
    assert line["colour"] == band["colour"]


def test_leaks_and_waits_are_those_of_the_reports() -> None:
    """Bytes that were never freed, and seconds in the queue, each by the lines of its call."""

    async def work() -> Records:
        async with AsyncMemoryPool("simulated", limit="16 MiB") as pool:
            before = await pool.allocate_async("64 KiB")
            with Recording(pool, frames=3) as recording:
                leaked = await pool.allocate_async("9 MiB")
                with pytest.raises(PoolTimeout):
                    await pool.allocate_async("10 MiB", timeout=0.01)
            before.free()
            leaked.free()
            return recording.records()

    records = asyncio.run(work())
    leaks, waits = icicle(records, "leaked"), icicle(records, "waited")
    assert (leaks["weight"], leaks["requests"]) == (9 * MIB, 1)
    assert waits["weight"] == pytest.approx(reports.waits(records).seconds)
    assert waits["requests"] == reports.waits(records).waits
    assert waits["weight"] > 0.005
    for shown in (leaks, waits):
        assert any("work" in one["short"] for _, one in cells(shown))


def test_nothing_recorded_is_nothing_to_show() -> None:
    """No records, no segments, no marks: empty columns, and no error."""
    nothing = made([])
    shown = live_by_tag(nothing)
    assert (shown.live.tolist(), shown.reserved.tolist(), shown.bands) == ([0, 0], [0, 0], ())
    assert memory_map(nothing).rows == ()
    assert marks(nothing).counts.tolist() == []
    for name in ("peak", "leaked", "waited"):
        assert icicle(nothing, name) == {"weight": 0, "requests": 0, "calls": []}
