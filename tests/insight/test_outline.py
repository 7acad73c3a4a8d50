"""What a pool had when recording began is told apart from what came later, and adds up with what goes back."""

import threading

import numpy as np
import pytest

from asyncmem import AsyncMemoryPool
from asyncmem.devices import Segment, Simulated
from asyncmem.insight import Kind, Recording, Records, reports
from asyncmem.insight.reports.summary import summarize
from asyncmem.insight.rows import ROW, in_order

from .support import MIB

Move = tuple[Kind, int, int]
"""What happened, to how many bytes at which address. Growth of bytes that are no whole MiB took some time."""


def moved(*moves: Move) -> list[Move]:
    """What is told in the end of moves that were read, one a nanosecond."""
    rows = np.zeros(len(moves), ROW)
    for at, (kind, nbytes, address) in enumerate(moves):
        rows[at]["time_ns"], rows[at]["kind"], rows[at]["nbytes"], rows[at]["address"] = at, kind, nbytes, address
        rows[at]["span_ns"] = nbytes % MIB
    found = in_order(rows[:0], rows, 0)
    return [(Kind(row["kind"]), int(row["nbytes"]), int(row["address"])) for row in found]


def test_what_goes_was_there_before() -> None:
    """A segment that was on its way back when recording began is not listed; it is put where it must have been."""
    listed, back = (Kind.GREW, 2 * MIB, 10), (Kind.TRIMMED, MIB, 20)
    assert moved(listed, back) == [(Kind.GREW, MIB, 20), listed, back]


def test_what_came_while_it_was_listed_comes_once() -> None:
    """It is told as growth, which it was; one that is listed and goes before it comes again, came twice."""
    listed, grown, back = (Kind.GREW, MIB + 1, 10), (Kind.GREW, MIB + 1, 10), (Kind.TRIMMED, MIB + 1, 10)
    assert moved((Kind.GREW, MIB, 10), grown) == [grown]
    assert moved(listed, back, grown) == [listed, back, grown]
    assert moved((Kind.GREW, MIB, 10), (Kind.GREW, MIB + 1, 20)) == [(Kind.GREW, MIB, 10), (Kind.GREW, MIB + 1, 20)]


def test_of_pages_the_sum_counts() -> None:
    """They have no address, and a list that has lost its beginning has none either."""
    listed, back = (Kind.GREW, MIB, 0), (Kind.TRIMMED, MIB, 0)
    assert moved(listed, back, back, back) == [(Kind.GREW, 2 * MIB, 0), listed, back, back, back]
    assert moved(listed, (Kind.TRIMMED, MIB, 10)) == [listed, (Kind.TRIMMED, MIB, 10)]


class Held(Simulated):
    """Takes segments back only when it may."""

    def __init__(self) -> None:
        super().__init__()
        self.asked, self.may = threading.Event(), threading.Event()

    def free_segment(self, segment: Segment) -> None:
        self.asked.set()
        assert self.may.wait(60)
        super().free_segment(segment)


def begun_late() -> Records:
    """Record a pool without a cache from when one of its buffers is on its way back."""
    device = Held()
    with AsyncMemoryPool(device, segments="direct", limit="64 MiB") as pool:
        kept, gone = pool.allocate(4 * MIB), pool.allocate(2 * MIB)
        threading.Thread(target=gone.free).start()
        assert device.asked.wait(60)
        with Recording(pool) as recording:
            device.may.set()
            more = pool.allocate(8 * MIB)
            while len(recording.records().of(Kind.TRIMMED)) < 1:
                threading.Event().wait(0.001)
        kept.free()
        more.free()
    return recording.records()


@pytest.mark.may_block
def test_reserved_never_goes_below_nothing() -> None:
    """Not where a recording begins while memory goes back, and what is reserved at the end is what there is."""
    records = begun_late()
    values = records.reserved()[1]
    assert values.min() >= 0
    assert values[-1] == 12 * MIB
    assert [one.nbytes for one in reports.segments(records, records.duration).segments] == [4 * MIB, 8 * MIB]


@pytest.mark.may_block
def test_summary_tells_growth_from_what_was_there() -> None:
    """Likewise the figures, and a trace's slices of growth."""
    records = begun_late()
    assert "growth         8 MiB had, 2 MiB given back; 6 MiB there before" in summarize(records)
    found = reports.summary(records)
    assert (found.grown, found.given_back) == (8 * MIB, 2 * MIB)
    assert [one.nbytes for one in records.grown()] == [8 * MIB]


def test_pages_that_were_there_are_no_segment() -> None:
    """Memory by pages has none, and what lies in it is more than the first of them hold."""
    with AsyncMemoryPool("simulated", segments="paged", limit="64 MiB") as pool:
        held = pool.allocate(5 * MIB)
        with Recording(pool) as recording:
            more = pool.allocate(20 * MIB)
        records = recording.records()
        assert records.reserved()[1][-1] == pool.stats().reserved_bytes
        assert reports.segments(records).segments == ()
        held.free()
        more.free()
