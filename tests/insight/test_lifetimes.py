"""When buffers are in use: who could share memory, and how little would do for all."""

from __future__ import annotations

import gc
import itertools
import random
from pathlib import Path

import numpy as np
import pytest

import asyncmem
from asyncmem import AsyncMemoryPool, InvalidRequest
from asyncmem.devices import Host
from asyncmem.insight import Lifetime, LifetimeAnalyzer, Recording, SharedBuffer
from asyncmem.insight.plans import packed
from asyncmem.pool import ReusePlan
from asyncmem.pool.placement import most_live
from asyncmem.replay import Trace

KIB, MIB = 1 << 10, 1 << 20
TRACES = Path(__file__).parents[1] / "traces"

pytestmark = pytest.mark.may_block  # pools are used from synchronous code


def analyzed(*steps: dict[str, int]) -> LifetimeAnalyzer:
    """Return what is known of a program whose steps use these sizes by name."""
    analyzer = LifetimeAnalyzer()
    for step, sizes in enumerate(steps):
        analyzer.record_usage(step, sizes)
    return analyzer


CHAIN = ({"x": MIB, "h": 2 * MIB}, {"h": 2 * MIB, "y": MIB}, {"y": MIB, "z": 2 * MIB})


def test_buffer_lives_from_its_first_use_to_its_last() -> None:
    """However often it is used between, and in whatever order the steps are told."""
    forth, back = analyzed(*CHAIN), LifetimeAnalyzer()
    for step in (2, 0, 1):
        back.record_usage(step, CHAIN[step])
    expected = {("x", MIB, 0, 1), ("h", 2 * MIB, 0, 2), ("y", MIB, 1, 3), ("z", 2 * MIB, 2, 3)}
    assert set(forth.lifetimes()) == set(back.lifetimes()) == expected
    assert [one.start for one in forth.lifetimes()] == [0, 0, 1, 2]
    assert repr(forth) == "<asyncmem.insight.LifetimeAnalyzer: 4 buffers of 6 MiB>"


def test_objects_are_told_apart_by_what_they_are() -> None:
    """Buffers, views of them, arrays of others; one that dies is not taken for the next at its address."""
    analyzer = LifetimeAnalyzer()
    with AsyncMemoryPool(Host(), limit="16 MiB") as pool:
        buffer = pool.allocate("1 MiB", tag="weights")
        analyzer.record_usage(0, [buffer])
        analyzer.record_usage(1, [buffer.view("float32"), buffer])
        arrays = pool.allocate_arrays([100, 100])
        analyzer.record_usage(0, [arrays])
        analyzer.record_usage(1, [arrays[1]])
        buffer.free()
        arrays.free()
    for step in range(2, 5):
        analyzer.record_usage(step, [np.zeros(100)])
        gc.collect()
    found = analyzer.lifetimes()
    assert found[0] == Lifetime("weights", MIB, 0, 2)
    assert found[1] == Lifetime(None, 912, 0, 2)
    assert found[2:] == tuple(Lifetime(None, 800, step, step + 1) for step in range(2, 5))


def test_analyzer_keeps_no_memory_alive() -> None:
    """What it was told of can be collected."""
    analyzer = LifetimeAnalyzer()
    array = np.zeros(100)
    view = array.view()
    analyzer.record_usage(0, [view])
    reference = next(iter(analyzer._alive.values()))[0]
    del view
    gc.collect()
    assert reference() is None


@pytest.mark.parametrize(
    ("step", "buffers"),
    [("1", {}), (True, {}), (0, [5]), (0, [object()]), (0, {"a": None}), (0, {"a": -1})],
    ids=["text", "truth", "nameless size", "no size", "no size by name", "negative"],
)
def test_what_has_no_size_is_refused(step: int, buffers: dict[str, object]) -> None:
    """By name, so that a program learns it where it makes the mistake."""
    with pytest.raises(InvalidRequest):
        LifetimeAnalyzer().record_usage(step, buffers)


def test_suggestions_say_who_could_be_one() -> None:
    """Of a chain every other one, and what that saves; as figures and in words."""
    found = analyzed(*CHAIN).get_optimization_suggestions()
    assert (found.buffers, found.total_bytes, found.most_live) == (4, 6 * MIB, 3 * MIB)
    assert found.shared == (
        SharedBuffer(2 * MIB, 2, 2 * MIB, (("h", 1), ("z", 1))),
        SharedBuffer(MIB, 2, MIB, (("x", 1), ("y", 1))),
    )
    assert found.reusable_bytes == 3 * MIB
    text = str(found)
    assert text.startswith("4 buffers of 6 MiB, of which 3 MiB can be reused; 3 MiB are live at most")
    assert "one of 2 MiB for 2 buffers: h, z" in text


@pytest.mark.parametrize("seed", range(5))
def test_nobody_is_told_to_share_with_who_is_live(seed: int) -> None:
    """At every time at most one of a shared buffer's names is live, and its size holds each of them."""
    draw = random.Random(seed)
    lives = {f"b{i}": Lifetime(f"b{i}", draw.randrange(1, 99), s := draw.randrange(40), s + draw.randrange(1, 9)) for i in range(80)}  # fmt: skip # noqa: E501
    analyzer = LifetimeAnalyzer()
    for key, nbytes, start, end in lives.values():
        for step in (start, end - 1):
            analyzer.record_usage(step, {str(key): nbytes})
    found = analyzer.get_optimization_suggestions()
    for shared in found.shared:
        group = [lives[key] for key, _ in shared.keys]
        assert len(group) == shared.buffers
        assert max(one.nbytes for one in group) == shared.nbytes
        for one, other in itertools.combinations(group, 2):
            assert one.end <= other.start or other.end <= one.start
    assert found.total_bytes - found.reusable_bytes >= found.most_live
    assert found.reusable_bytes > found.total_bytes / 2


def test_empty_program_has_nothing_to_say() -> None:
    """Nor has one of empty buffers."""
    analyzer = analyzed({"nothing": 0})
    assert analyzer.lifetimes() == ()
    assert analyzer.get_optimization_suggestions().shared == ()
    assert analyzer.compute_reuse_plan() == ReusePlan(())


def least_peak(starts: list[int], ends: list[int], sizes: list[int]) -> int:
    """Return the best peak there is: each buffer in every order, as low as it fits."""
    best = sum(sizes)
    for order in itertools.permutations(range(len(sizes))):
        placed: list[tuple[int, int, int]] = []  # offset, top, index
        for index in order:
            offset = 0
            for low, top, other in sorted(placed):
                if starts[other] < ends[index] and ends[other] > starts[index] and low < offset + sizes[index]:
                    offset = max(offset, top)
            placed.append((offset, offset + sizes[index], index))
        best = min(best, max(top for _, top, _ in placed))
    return best


@pytest.mark.parametrize("seed", range(12))
def test_small_programs_are_placed_as_well_as_can_be(seed: int) -> None:
    """All orders of few buffers find no lower peak."""
    draw = random.Random(seed)
    sizes = [draw.choice((1, 2, 3, 5, 8)) for _ in range(6)]
    starts = sorted(draw.randrange(6) for _ in sizes)
    ends = [start + draw.randrange(1, 5) for start in starts]
    columns = [np.array(column, np.int64) for column in (starts, ends, sizes)]
    offsets = packed(*columns)
    assert int((offsets + columns[2]).max()) == least_peak(starts, ends, sizes)


@pytest.mark.parametrize("seed", range(8))
def test_random_programs_are_placed_near_what_is_live(seed: int) -> None:
    """No two live places overlap, which the plan checks itself, and little is lost."""
    draw = np.random.default_rng(seed)
    count = 300
    starts = draw.integers(0, 200, count)
    lives = np.where(draw.random(count) < 0.1, draw.integers(1, 200, count), draw.integers(1, 12, count))
    sizes = (2 ** draw.uniform(9, 22, count)).astype(np.int64)
    analyzer = LifetimeAnalyzer()
    for index, (start, life, nbytes) in enumerate(zip(starts.tolist(), lives.tolist(), sizes.tolist(), strict=True)):
        analyzer.record_usage(start, {str(index): nbytes})
        analyzer.record_usage(start + life, {str(index): nbytes})
    plan = analyzer.compute_reuse_plan()
    assert {place.key for place in plan.places} == {str(index) for index in range(count)}
    assert plan.lower_bound <= plan.peak <= 1.06 * plan.lower_bound


def test_repairs_lower_the_peak() -> None:
    """Where no order is good at once, buffers that stuck out come first and are placed again."""
    from asyncmem.insight.plans import _attempts

    gained = 0
    for seed in range(10):
        draw = np.random.default_rng(seed)
        starts = np.sort(draw.integers(0, 40, 40))
        ends = starts + draw.integers(1, 12, 40)
        sizes = draw.integers(1, 100, 40)
        peaks = [
            int((offsets + sizes).max()) for offsets in _attempts(starts, ends, sizes, most_live(starts, ends, sizes))
        ]
        gained += min(peaks) < min(peaks[:4])
    assert gained > 2


def test_alignment_is_the_caller_s() -> None:
    """Larger granules cost what rounding costs, and no place begins within one."""
    plan = analyzed(*CHAIN, {"small": 100}).compute_reuse_plan(align=64 * KIB)
    assert all(place.offset % (64 * KIB) == 0 for place in plan.places)
    assert plan.peak == plan.lower_bound


def test_recorded_program_is_planned_by_its_tags_and_lines() -> None:
    """What was there before is left out, what is never freed lives to the end; keys are tags, else lines."""
    with AsyncMemoryPool(Host(), limit="64 MiB") as pool:
        before = pool.allocate("4 MiB")
        with Recording(pool) as recording:
            with asyncmem.tag("first"):
                first = pool.allocate("1 MiB")
            second = pool.allocate("2 MiB")
            first.free()
            with asyncmem.tag("third"):
                third = pool.allocate("1 MiB")
            before.free()
            second.free()
        third.free()
    analyzer = LifetimeAnalyzer.from_records(recording)
    one, two, three = analyzer.lifetimes()
    assert (one.key, one.nbytes, three.key, three.nbytes) == ("first", MIB, "third", MIB)
    assert "test_lifetimes.py" in str(two.key)
    assert one.end < three.start < two.end < three.end
    plan = analyzer.compute_reuse_plan()
    assert (plan.peak, plan.lower_bound) == (3 * MIB, 3 * MIB)
    assert plan.places[0].offset == plan.places[2].offset


def test_one_step_of_a_recording_is_planned_by_its_times() -> None:
    """What is allocated in it, whether or not it is freed there; applied, each request is at its place."""
    with AsyncMemoryPool(Host(), limit="64 MiB") as pool:

        def step() -> None:
            with pool.allocate("1 MiB", tag="x") as x, pool.allocate("2 MiB", tag="y"):
                x.free()
                pool.allocate("1 MiB", tag="z").free()

        with Recording(pool) as recording:
            step()
            middle = recording.records()
            step()
        since = middle.rows["time_ns"][-1] - middle.began
        analyzer = LifetimeAnalyzer.from_records(recording, since=(since + 1) / 1e9)
        assert [one.key for one in analyzer.lifetimes()] == ["x", "y", "z"]
        assert len(LifetimeAnalyzer.from_records(recording, until=(since + 1) / 1e9).lifetimes()) == 3
        with pool.apply_plan(analyzer.compute_reuse_plan(), strict=True) as memory:
            for _ in range(3):
                with memory.allocate(key="x") as x, memory.allocate(key="y"):
                    x.free()
                    memory.allocate(key="z").free()
                memory.next_step()
            assert memory.use.planned == 9


def test_records_of_several_pools_are_not_one_program() -> None:
    """The error says how to take those of one."""
    with AsyncMemoryPool(Host(), limit="64 MiB", name="a") as a, AsyncMemoryPool(Host(), limit="64 MiB", name="b") as b:
        with Recording(a, b) as recording:
            for pool in (a, b):
                pool.allocate("1 MiB").free()
        with pytest.raises(InvalidRequest, match="in_pool"):
            LifetimeAnalyzer.from_records(recording)
        assert len(LifetimeAnalyzer.from_records(recording.records().in_pool("a")).lifetimes()) == 1


def test_recorded_program_of_four_streams_is_placed_exactly() -> None:
    """2,388 allocations, as large as what is live at most."""
    trace = Trace.load(TRACES / "four_streams.npz")
    plan = LifetimeAnalyzer.from_trace(trace).compute_reuse_plan()
    assert len(plan.places) == trace.allocations
    assert plan.peak == plan.lower_bound
    assert plan.peak <= 1.001 * trace.peak_requested


@pytest.mark.parametrize("name", ["gpt2_train_varlen", "gnn_sampled", "stream_prefetch"])
def test_recorded_programs_are_placed_within_a_fiftieth_of_what_is_live(name: str) -> None:
    """Some 2,000 allocations around the peak, and as many from the middle of the run."""
    trace = Trace.load(TRACES / f"{name}.npz")
    live = np.cumsum(np.where(trace.op == 0, trace.nbytes, np.where(trace.op == 1, -trace.nbytes, 0)))
    for event in (int(live.argmax()), len(trace) // 2):
        since, until = trace.time_us[max(event - 2500, 0)], trace.time_us[min(event + 2500, len(trace) - 1)]
        analyzer = LifetimeAnalyzer.from_trace(trace, since=since / 1e6, until=until / 1e6)
        plan = analyzer.compute_reuse_plan()
        assert len(plan.places) > 1000
        assert plan.lower_bound <= plan.peak <= 1.02 * analyzer.get_optimization_suggestions().most_live


def test_part_of_a_trace_has_what_is_allocated_in_it() -> None:
    """And ends what is still live with the part."""
    trace = Trace.load(TRACES / "four_streams.npz")
    middle = float(trace.time_us[len(trace) // 2]) / 1e6
    early, late = LifetimeAnalyzer.from_trace(trace, until=middle), LifetimeAnalyzer.from_trace(trace, since=middle)
    assert len(early.lifetimes()) + len(late.lifetimes()) == trace.allocations
    assert max(one.end for one in early.lifetimes()) <= min(one.start for one in late.lifetimes())
