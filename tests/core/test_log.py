"""A heap's log: each reader gets all that it has room for, once and in order, and nobody else is held up by it."""

import random
import threading
from contextvars import ContextVar
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from asyncmem import AsyncMemoryPool
from asyncmem.core import LOG_ROW, Heap, Kind, Level, Witness, log_time_ns

MIB = 1 << 20


@pytest.fixture
def heap() -> Heap:
    heap = Heap()
    heap.add_segment(1 << 30, 64 * MIB, 0, 0)
    heap.add_segment(1 << 32, 64 * MIB, 1, 0)
    return heap


def rows(content: bytes) -> NDArray[np.void]:
    return np.frombuffer(content, LOG_ROW)


def sizes(content: bytes) -> list[int]:
    return rows(content)["nbytes"].tolist()


def test_readers_come_and_go_and_each_reads_from_its_own_place(heap: Heap) -> None:
    """What one consumes the other still has; what is left unconsumed comes again."""
    first, held = heap.open_log()
    assert held == b""
    one = heap.take(100, 0)
    second, held = heap.open_log()
    assert sizes(held) == [100]
    heap.free(heap.take(200, 0))
    assert sizes(heap.read_log(first).rows) == [100, 200, 200]
    assert sizes(heap.read_log(first, 1, consume=True).rows) == [100]
    assert sizes(heap.read_log(first, consume=True).rows) == [200, 200]
    assert sizes(heap.read_log(second, consume=True).rows) == [200, 200]
    heap.free(one)
    heap.close_log(second)
    assert sizes(heap.read_log(first, consume=True).rows) == [100]
    assert heap.read_log(second).rows == b""
    heap.close_log(first)
    assert not heap.logged


@pytest.mark.parametrize("keep", [1, 100, 5000, 20_000])
def test_of_what_is_left_unread_the_newest_rows_are_kept(heap: Heap, keep: int) -> None:
    """As many as the reader wants, across pages; those before are counted as lost, for this reader alone."""
    patient, _ = heap.open_log()
    hasty, _ = heap.open_log(keep)
    for nbytes in range(1, 10_001):
        heap.free(heap.take(nbytes, 0))
    whole = sizes(heap.read_log(patient).rows)
    assert len(whole) == 20_000
    part = heap.read_log(hasty, consume=True)
    assert sizes(part.rows) == whole[-keep:]
    assert part.lost == 20_000 - len(whole[-keep:])
    heap.free(heap.take(7, 0))
    part = heap.read_log(hasty)
    assert sizes(part.rows) == [7, 7][-keep:]
    assert part.lost == 20_000 - len(whole[-keep:]) + max(0, 2 - keep)
    assert heap.read_log(patient).lost == 0


def test_a_row_of_a_free_says_how_long_it_was_held(heap: Heap) -> None:
    """Also where the row of its take is gone; what was there before the log is held since that began."""
    before = heap.take(100, 0)
    began = log_time_ns()
    reader, held = heap.open_log(2)
    (row,) = rows(held)
    assert (row["kind"], row["nbytes"]) == (Kind.HELD, 100)
    assert row["time_ns"] >= began
    late = heap.take(200, 0)
    for _ in range(10_000):
        heap.free(heap.take(300, 0))
    heap.free(late)
    heap.free(before)
    one, other = rows(heap.read_log(reader).rows)
    assert one["nbytes"] == 200
    assert other["span_ns"] > one["span_ns"] > 0
    assert other["time_ns"] - other["span_ns"] == row["time_ns"]
    assert (other["number"], one["number"]) == (0, 1)


def test_what_is_held_is_known_while_there_is_a_log(heap: Heap) -> None:
    """A random history, and at every time what was taken and not freed, by number."""
    draw = random.Random(3)
    assert heap.held() == b""
    reader, _ = heap.open_log(0)
    live: dict[int, int] = {}
    for _ in range(5000):
        if draw.random() < 0.52 and len(live) < 200:
            nbytes = draw.randrange(1, 100_000)
            live[heap.take(nbytes, 0)] = nbytes
        elif live:
            block = draw.choice(list(live))
            del live[block]
            heap.free(block)
        if draw.random() < 0.02:
            assert sorted(sizes(heap.held())) == sorted(live.values())
    numbers = rows(heap.held())["number"]
    assert (np.diff(numbers.astype(np.int64)) > 0).all()
    heap.close_log(reader)
    assert heap.held() == b""


def test_an_undone_take_is_held_by_nobody(heap: Heap) -> None:
    """It is logged as undone, under its number."""
    reader, _ = heap.open_log()
    block, owed = heap.take_foreign(100, 0) or (0, ())
    heap.put_back(block, owed)
    assert heap.held() == b""
    taken, undone = rows(heap.read_log(reader).rows)
    assert (taken["kind"], undone["kind"]) == (Kind.ALLOCATED, Kind.UNDONE)
    assert taken["number"] == undone["number"]


def test_levels_say_what_served(heap: Heap) -> None:
    """Placement, the cache, and memory that another stream has used and not done with."""
    other = heap.add_stream()
    reader, _ = heap.open_log()
    for _ in range(3):
        heap.free(heap.take(4096, 0))
    heap.flush()
    whole = heap.take(64 * MIB, 0)
    heap.free(whole)
    assert heap.take_foreign(64 * MIB, other, late=True) is not None
    found = rows(heap.read_log(reader).rows)
    levels = found["level"][found["kind"] == Kind.ALLOCATED].tolist()
    assert levels == [Level.MAPPED, Level.MAPPED, Level.STREAM_CACHE, Level.MAPPED, Level.FOREIGN]


def test_notes_stand_between_takes_and_frees() -> None:
    """In their order, with what the pool says of them; without a log they go nowhere."""
    with AsyncMemoryPool("simulated") as pool:
        pool.allocate(1).free()
        core = pool._opened.core
        core.note(Kind.GREW, nbytes=5)
        reader, _ = core.open_log()
        buffer = pool.allocate(10)
        core.note(Kind.PRESSURE, 2, 30, 40, 0.5, 1)
        buffer.free()
        first, note, last = rows(core.read_log(reader).rows)
        core.close_log(reader)
    assert (first["kind"], last["kind"]) == (Kind.ALLOCATED, Kind.FREED)
    assert first["time_ns"] <= note["time_ns"] <= last["time_ns"]
    assert [note[name] for name in ("kind", "level", "nbytes", "address", "span_ns", "stream")] == [
        Kind.PRESSURE, 2, 30, 40, 500_000_000, 1,
    ]  # fmt: skip


def test_one_witness_sees_for_all_who_watch() -> None:
    """Another one is refused while there is one; the doors are fast again when the last has gone."""
    tag: ContextVar[str | None] = ContextVar("tag", default=None)
    with AsyncMemoryPool("simulated") as pool:
        pool.allocate(10).free()
        core = pool._opened.core
        witness = Witness(tag)
        core.watch(witness)
        core.watch(witness)
        with pytest.raises(ValueError, match="another witness"):
            core.watch(Witness(tag))
        core.unwatch()
        assert core.witness is witness
        reader, _ = core.open_log()
        tag.set("mine")
        pool.allocate(10).free()
        core.unwatch()
        assert core.witness is None
        pool.allocate(20).free()
        seen = rows(core.read_log(reader).rows)
        core.close_log(reader)
    assert [witness.tags[number] for number in seen["tag"]] == ["mine", "mine", "", ""]
    place, caller = witness.sites[seen["site"][0]]
    assert caller == 0
    assert witness.places[place][0] == __file__
    assert witness.threads[seen["thread"][0]] == threading.current_thread().name
    assert seen["thread"][3] == seen["thread"][0], "a free knows its thread without a witness"


def test_quiet_folders_are_passed_over_but_for_those_that_are_heard() -> None:
    """Then who called them is who asked."""
    here = f"{Path(__file__).parent}/"
    tag: ContextVar[str | None] = ContextVar("tag", default=None)
    with AsyncMemoryPool("simulated") as pool:
        core = pool._opened.core
        for quiet, heard, expected in (((), (), True), ((here,), (), False), ((here,), (here,), True)):
            witness = Witness(tag, quiet, heard)
            core.watch(witness)
            pool.allocate(10).free()
            core.unwatch()
            assert (witness.places[-1][0] == __file__) is expected
