"""Reports say of records what adding them up one by one says."""

import asyncio
import threading
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any

import pytest

from asyncmem import AsyncMemoryPool, InvalidRequest, PoolTimeout, tag
from asyncmem.insight import Kind, Record, Recording, Records, reports
from asyncmem.insight.reports import Node

from .support import MIB, Program

MAKERS = {Kind.ALLOCATED, Kind.HELD}


@pytest.fixture(scope="module")
def records() -> Records:
    """A random program on a pool that was in use before, with some that is never freed."""

    async def work() -> Records:
        async with AsyncMemoryPool("simulated", name="mine", limit="256 MiB") as pool:
            program = Program(pool, 5)
            await program.run(30)
            with Recording(pool, frames=4) as recording:
                with tag("block"):
                    await program.run(400)
                await program.run(100)
            program.live.clear()
            return recording.records()

    return asyncio.run(work())


def live_after(records: Records, count: int) -> dict[int, Record]:
    """What is live after so many records, by its number."""
    live: dict[int, Record] = {}
    for record in list(records)[:count]:
        if record.kind in MAKERS:
            live[record.number] = record
        elif record.kind is Kind.FREED:
            del live[record.number]
    return live


def peak_of(records: Records) -> dict[int, Record]:
    """What is live when the most is."""
    most = held = at = 0
    for count, record in enumerate(records, start=1):
        held += record.nbytes if record.kind in MAKERS else -record.nbytes if record.kind is Kind.FREED else 0
        if held > most:
            most, at = held, count
    return live_after(records, at)


def size_of(live: dict[int, Record]) -> int:
    return sum(one.nbytes for one in live.values())


def test_the_summary_adds_up(records: Records) -> None:
    """Peak, allocations, what is left."""
    found = reports.summary(records)
    taken = [one.nbytes for one in records if one.kind is Kind.ALLOCATED]
    peak, end = peak_of(records), live_after(records, len(records))
    assert (found.records, found.peak, found.live) == (len(records), size_of(peak), size_of(end))
    assert (found.allocations, found.allocated, found.live_buffers) == (len(taken), sum(taken), len(end))
    assert sum(group.nbytes for group in found.tags) == sum(group.nbytes for group in found.lines) == found.peak
    assert {group.name for group in found.tags} <= {"block", "?"}
    assert found.most_reserved >= found.peak
    assert found.pools[0].name == "mine"


def test_the_table_of_threads_has_what_each_allocated() -> None:
    """For how long it was held too, where other threads freed it: those have no row, for they allocated nothing."""
    with AsyncMemoryPool("simulated") as pool, Recording(pool) as recording:
        for nbytes in (1, 2):
            ended = threading.Thread(target=pool.allocate(nbytes).free, name="who frees")
            ended.start()
            ended.join()
    records = recording.records()
    (row,) = reports.table(records, "thread").rows
    assert (row.name, row.allocations) == (threading.current_thread().name, 2)
    lifetimes = [one.lifetime for one in records.of(Kind.FREED)]
    assert row.mean_lifetime == pytest.approx(sum(lifetimes) / 2)


def test_the_table_adds_up(records: Records) -> None:
    """Each row is what its records come to, whatever they are put together by."""
    peak, end = peak_of(records), live_after(records, len(records))
    names: dict[str, Callable[[Record], object]] = {
        "site": lambda one: one.site,
        "tag": lambda one: one.tag,
        "nbytes": lambda one: one.nbytes,
        "pool": lambda one: one.pool,
    }
    for column, name in names.items():
        sums: dict[str, Counter[str]] = defaultdict(Counter)
        for record in records:
            if record.kind is Kind.ALLOCATED:
                sums[str(name(record) or "?")].update(count=1, nbytes=record.nbytes)
            elif record.kind is Kind.FREED:
                sums[str(name(record) or "?")].update(freed=1, held=round(record.lifetime * 1e9))
            elif record.kind is Kind.WAITED:
                sums[str(name(record) or "?")].update(waits=1, waited=round(record.duration * 1e9))
        for moment, live in (("peak", peak), ("end", end)):
            for one in live.values():
                sums[str(name(one) or "?")][moment] += one.nbytes
        rows = reports.table(records, column).rows
        assert {row.name for row in rows} == {key for key, one in sums.items() if set(one) - {"freed", "held"}}
        for row in rows:
            want = sums[row.name]
            assert (row.allocations, row.allocated) == (want["count"], want["nbytes"])
            assert (row.at_peak, row.at_end) == (want["peak"], want["end"])
            assert row.waited == pytest.approx(want["waited"] / 1e9)
            assert row.mean_lifetime == pytest.approx(want["held"] / max(want["freed"], 1) / 1e9)
        assert [row.at_peak for row in rows] == sorted((row.at_peak for row in rows), reverse=True)
    with pytest.raises(InvalidRequest, match="column"):
        reports.table(records, "colour")


def test_stats_have_every_allocation_once(records: Records) -> None:
    """In one size, and each free in one lifetime."""
    found = reports.stats(records)
    taken = sorted(one.nbytes for one in records if one.kind is Kind.ALLOCATED)
    lives = [one.lifetime for one in records if one.kind is Kind.FREED]
    assert (found.smallest, found.largest) == (taken[0], taken[-1])
    assert found.median == taken[(len(taken) - 1) // 2]
    assert sum(found.served.values()) == found.allocations == len(taken)
    for size in found.sizes:
        those = [one for one in taken if size.below // 2 <= one < size.below]
        assert (size.allocations, size.nbytes) == (len(those), sum(those))
    assert sum(size.allocations for size in found.sizes) == len(taken)
    for life in found.lifetimes:
        assert life.buffers == sum(life.below / 10 <= one < life.below for one in lives)
    assert sum(life.buffers for life in found.lifetimes) == len(lives)


def test_the_tree_has_every_buffer_below_its_lines(records: Records) -> None:
    """A line's bytes are those of what it called, or of what was asked for in it."""
    peak = peak_of(records)
    found = reports.tree(records)
    assert (found.nbytes, found.buffers) == (size_of(peak), len(peak))
    want: Counter[tuple[str, ...]] = Counter()
    for one in peak.values():
        way = tuple(str(site) for site in reversed(one.frames)) or ("?",)
        for depth in range(1, len(way) + 1):
            want[way[:depth]] += one.nbytes
    seen: dict[tuple[str, ...], int] = {}

    def walk(node: Node, above: tuple[str, ...]) -> None:
        seen[(*above, node.name)] = node.nbytes
        assert [one.nbytes for one in node.calls] == sorted((one.nbytes for one in node.calls), reverse=True)
        for one in node.calls:
            walk(one, (*above, node.name))

    for node in found.calls:
        walk(node, ())
    assert seen == dict(want)
    half = records.duration / 2
    assert reports.tree(records, half).nbytes == int(records.live_at(half).rows["nbytes"].sum())


@pytest.mark.parametrize("moments", [1, 7, 300])
def test_the_timeline_loses_no_peak(records: Records, moments: int) -> None:
    """In each part is the most of it, with what was live when it began."""
    found = reports.timeline(records, moments)
    assert len(found.moments) == moments
    assert max(one.live for one in found.moments) == found.peak == size_of(peak_of(records))
    times, live = records.live()
    end = max(round(records.duration * 1e9), 1)
    edges = [round(one.time * 1e9) for one in found.moments] + [end + 1]
    for moment, first, last in zip(found.moments, edges, edges[1:], strict=False):
        before = [size for time, size in zip(times, live, strict=True) if time < first][-1:]
        inside = [size for time, size in zip(times, live, strict=True) if first <= time < last]
        assert moment.live == max([0, *before, *inside])
    assert found.limit == 256 * MIB
    assert max(one.reserved for one in found.moments) == reports.summary(records).most_reserved
    with pytest.raises(InvalidRequest, match="moments"):
        reports.timeline(records, 0)


def test_segments_hold_what_is_live(records: Records) -> None:
    """Every buffer lies in one of them, and none over another; the hole is the largest gap."""
    found = reports.segments(records)
    assert sum(len(one.pieces) for one in found.segments) == len(peak_of(records))
    assert sum(one.nbytes for one in found.segments) <= reports.summary(records).most_reserved
    for one in found.segments:
        ends = 0
        gaps = []
        for piece in one.pieces:
            assert piece.offset >= ends
            gaps.append(piece.offset - ends)
            ends = piece.offset + piece.nbytes
        assert ends <= one.nbytes
        assert one.largest_hole == max([*gaps, one.nbytes - ends])
        assert one.live == sum(piece.nbytes for piece in one.pieces)


@pytest.mark.asyncio
async def test_a_segment_that_went_back_is_gone() -> None:
    """It is there for as long as the pool had it."""
    async with AsyncMemoryPool("simulated", segment_size="2 MiB") as pool:
        with Recording(pool) as recording:
            (await pool.allocate_async("1 MiB")).free()
            await pool.trim()
        records = recording.records()
    assert len(reports.segments(records).segments) == 1
    assert reports.segments(records, records.duration + 1).segments == ()


@pytest.mark.asyncio
async def test_waits_are_added_up_by_line() -> None:
    """Those that were granted and those that were not, each with its time; growth is waited for too."""
    async with AsyncMemoryPool("simulated", limit="4 MiB") as pool:
        with Recording(pool) as recording:
            kept = await pool.allocate_async("3 MiB")

            async def ask(timeout: float | None) -> None:
                (await pool.allocate_async("2 MiB", timeout=timeout)).free()

            with pytest.raises(PoolTimeout):
                await ask(0.01)
            waiting = asyncio.create_task(ask(None))
            await asyncio.sleep(0)  # its first step, in which it asks
            kept.free()
            await waiting
        records = recording.records()
    found = reports.waits(records)
    all_of_them = [one for one in records if one.kind is Kind.WAITED]
    assert found.waits == len(all_of_them)
    assert found.seconds == pytest.approx(sum(one.duration for one in all_of_them))
    (line,) = [one for one in found.lines if "ask" in one.name]
    assert (line.waits, line.given_up) == (2, 1)
    mine = [one.duration for one in all_of_them if one.site is not None and "ask" in one.site.function]
    assert line.seconds == pytest.approx(sum(mine))
    assert line.longest == pytest.approx(max(mine))
    assert line.longest > 0.005
    assert sum(one.waits for one in reports.timeline(records).moments) == found.waits


def plant(pool: AsyncMemoryPool) -> Any:
    return pool.allocate(4096, tag="planted")


def test_a_leak_among_many_is_named() -> None:
    """With file and line; what was there before, and what was freed, is not."""
    with AsyncMemoryPool("simulated") as pool:
        before = pool.allocate(512)
        with Recording(pool) as recording:
            for _ in range(50_000):
                pool.allocate(1000).free()
            leaked = plant(pool)
            for _ in range(50_000):
                pool.allocate(1000).free()
        before.free()
        leaked.free()
    found = reports.leaks(recording.records())
    (line,) = found.lines
    assert (line.file, line.line, line.function) == (__file__, plant.__code__.co_firstlineno + 1, "plant")
    assert (found.nbytes, found.buffers, line.nbytes, line.buffers) == (4096, 1, 4096, 1)
    assert line.tags == ("planted",)
    assert 0 < line.age < recording.records().duration


def test_nothing_has_reports() -> None:
    """An empty recording is one, and so is a pool that did nothing."""
    with AsyncMemoryPool("simulated") as pool, Recording(pool) as recording:
        pass
    for name in reports.__all__:
        if name.islower():
            assert getattr(reports, name)(recording.records())
    assert reports.leaks(recording.records()).buffers == 0
