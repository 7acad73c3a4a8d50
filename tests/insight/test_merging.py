"""`merge`: the records of several processes add up to those of one, whatever their clocks and names."""

from dataclasses import replace

import numpy as np
import pytest

from asyncmem import AsyncMemoryPool, InvalidRequest, tag
from asyncmem.insight import Origin, Recording, Records, merge
from asyncmem.insight.reports import leaks, summary, tree, waits

MIB = 1 << 20

pytestmark = pytest.mark.may_block


def recorded(name: str, *tags: str, keep: bool = False) -> Records:
    """What a pool of that name did: it held 1 MiB for each tag at the same time."""
    with AsyncMemoryPool("host", limit="64 MiB", name=name) as pool:
        held = [pool.allocate(MIB)]  # before it is recorded
        with Recording(pool, frames=3) as recording:
            for one in tags:
                with tag(one):
                    held.append(pool.allocate(MIB))
            while not keep and len(held) > 1:
                held.pop().free()
        records = recording.records()
        held.clear()
    return records


def moved(records: Records, steady: int, wall: float, process: int) -> Records:
    """The same of another process, whose steady clock is so many nanoseconds ahead, so many seconds later."""
    rows = records.rows.copy()
    rows["time_ns"] += steady
    origin = Origin(("program",), process, "host", "3.11.7", "0.1.0")
    return replace(
        records,
        rows=rows,
        began=records.began + steady,
        ended=records.ended + steady,
        wall=records.wall + wall,
        origin=origin,
    )


def test_figures_add_up() -> None:
    """Those of reports, too, and what names stand for stays."""
    first, second = recorded("first", "a", "b"), recorded("second", "b", "c", "d", keep=True)
    found = merge(first, second)
    assert len(found) == len(first) + len(second)
    assert [pool.name for pool in found.names.pools] == ["first", "second"]
    assert found.limit == 128 * MIB
    assert {one.name: one.allocations for one in found.by("tag")} == {"?": 2, "a": 1, "b": 2, "c": 1, "d": 1}
    assert [one.frames for one in found.in_pool("second")] == [one.frames for one in second]
    assert [one.tag for one in found.in_pool("first")] == [one.tag for one in first]
    assert [one.thread for one in found.in_pool("second")] == [one.thread for one in second]
    assert sum(one.nbytes for one in found.live_at()) == 5 * MIB
    assert leaks(found).buffers == leaks(first).buffers + leaks(second).buffers
    assert summary(found).allocations == summary(first).allocations + summary(second).allocations
    assert tree(found).nbytes == found.peak().nbytes
    assert waits(found).lines == ()


def test_times_are_those_of_the_calendar() -> None:
    """Steady clocks begin anew on each machine, so the records of one that began later come later."""
    first, second = recorded("first", "a"), recorded("second", "b")
    later = moved(second, steady=10**15, wall=first.wall + 100 - second.wall, process=2)
    for found in (merge(first, later), merge(later, first)):
        assert (found.wall, found.began) == (first.wall, first.began)
        assert found.duration == pytest.approx(100 + later.duration, abs=1e-4)
        assert next(iter(found)).pool == "first"
        assert (np.diff(found.rows["time_ns"]) >= 0).all()
        assert [one.time - 100 for one in found.in_pool("second")] == pytest.approx(
            [one.time for one in later], abs=1e-5
        )


def test_pools_of_one_name_are_told_apart() -> None:
    """By the processes that had them; others keep their names."""
    one = recorded("pool", "a")
    found = merge(*(moved(one, 0, number, process=number) for number in (1, 2)), recorded("other", "a"))
    assert {pool.name for pool in found.names.pools} == {"pool (host:1)", "pool (host:2)", "other"}
    assert len(found.in_pool("pool (host:1)")) == len(one)


def test_what_is_missing_in_one_is_missing_in_all() -> None:
    """Notes, what was lost, and what is not known at the end."""
    one = recorded("pool", "a")
    found = merge(replace(one, lost=3, note="Torn.", end_known=False), replace(one, lost=4, note="Torn.", wall=0.0))
    assert (found.lost, found.note, found.end_known) == (7, "Torn.", False)
    assert len(found) == 2 * len(one)


def test_one_is_itself_and_none_is_refused() -> None:
    """And so is what is no recording."""
    one = recorded("pool", "a")
    assert merge(one) is one
    for wrong in ((), ("run.amem",), (one, None)):
        with pytest.raises(InvalidRequest, match="records"):
            merge(*wrong)  # type: ignore[arg-type]


def test_what_numbers_cannot_name_is_refused() -> None:
    """Rows name 65,536 tags at most."""
    one = recorded("pool", "a")
    parts = []
    for process in (1, 2):
        part = moved(one, 0, 0, process)
        names = replace(part.names, tags=[*part.names.tags, *(f"{process}-{number}" for number in range(40_000))])
        parts.append(replace(part, names=names))
    with pytest.raises(InvalidRequest, match="fewer tags"):
        merge(*parts)
