"""What a program asks for again and again is found, with what would help."""

import io

import pytest

from asyncmem import AsyncMemoryPool, InvalidRequest
from asyncmem.insight import (
    Recording,
    analyze_allocation_patterns,
    dump_allocation_trace,
    memory_debug,
    set_memory_debug,
)

from .support import KIB, MIB


def test_sizes_are_counted_with_a_warmup_to_paste() -> None:
    """For each size: how often, how many at once; a pool that is warmed up so has fewer misses in the same program."""

    def program(pool: AsyncMemoryPool) -> Recording:
        with Recording(pool) as recording:
            for _ in range(10):
                held = [pool.allocate(MIB) for _ in range(5)] + [pool.allocate(64 * KIB) for _ in range(3)]
                held.clear()
        return recording

    with AsyncMemoryPool("simulated", segment_size="2 MiB") as pool:
        cold = analyze_allocation_patterns(program(pool))
    assert cold.allocations == 80
    assert [(one.nbytes, one.allocations, one.most_live) for one in cold.sizes] == [(MIB, 50, 5), (64 * KIB, 30, 3)]
    assert cold.warmup == ((MIB, 5), (64 * KIB, 3))
    assert 'warmup=[("1 MiB", 5), ("64 KiB", 3)]' in str(cold)
    assert cold.efficiency_score < 1
    with AsyncMemoryPool("simulated", segment_size="2 MiB", warmup=cold.warmup) as pool:
        pool._opened.run(lambda: None).block(60)
        assert pool._ready is not None
        pool._ready.block(60)
        warm = analyze_allocation_patterns(program(pool))
    assert warm.efficiency_score > cold.efficiency_score


def test_low_hit_rates_are_warned_of_with_the_remedy() -> None:
    """Sizes that never come again want rounding; too little memory wants more."""
    with AsyncMemoryPool("simulated", segment_size="1 MiB", limit="1 GiB") as pool, Recording(pool) as recording:
        held = [pool.allocate(MIB + 1000 * number) for number in range(40)]
        found = analyze_allocation_patterns(recording)
        held.clear()
    assert found.efficiency_score < 0.5
    (warning,) = found.warnings
    assert "were hits: round sizes up" in warning
    assert warning in str(found)


def test_fragmentation_is_warned_of_with_the_remedy() -> None:
    """Reserved memory that nobody held even at the peak counts as such."""
    with AsyncMemoryPool("simulated", segment_size="64 MiB") as pool, Recording(pool) as recording:
        held = pool.allocate(2 * MIB)
        found = analyze_allocation_patterns(recording)
        held.free()
    assert found.fragmentation_ratio == pytest.approx(1 - found.memory_efficiency)
    assert found.fragmentation_ratio > 0.3
    (warning,) = found.warnings
    assert "segment_size" in warning


def test_nothing_recorded_is_nothing_wrong() -> None:
    """An empty recording has no warnings, and every rate is at its best."""
    with AsyncMemoryPool("simulated") as pool, Recording(pool) as recording:
        pass
    found = analyze_allocation_patterns(recording)
    assert (found.allocations, found.efficiency_score, found.fragmentation_ratio) == (0, 1, 0)
    assert not found.warnings


def test_a_trace_is_dumped_line_by_line() -> None:
    """The newest records, each with its size, tag and line; what is left out is counted."""
    out = io.StringIO()
    with AsyncMemoryPool("simulated", name="mine") as pool, Recording(pool) as recording:
        for _ in range(5):
            pool.allocate(3 * KIB, tag="steps").free()
    dump_allocation_trace(recording, last=2, file=out)
    left_out, taken, freed = out.getvalue().splitlines()
    assert left_out.endswith("earlier records are left out")
    for line in (taken, freed):
        assert "3 KiB" in line
        assert "tag steps" in line
        assert f"in {__file__}:" in line
    assert "allocated" in taken
    assert "freed" in freed
    everything = io.StringIO()
    dump_allocation_trace(recording, last=None, file=everything)
    assert len(everything.getvalue().splitlines()) == len(recording.records())


def test_memory_debug_records_in_the_background() -> None:
    """Then looks need no argument; without it they say what to do."""
    with pytest.raises(InvalidRequest, match=r"set_memory_debug\(True\)"):
        analyze_allocation_patterns()
    set_memory_debug(True)
    try:
        first = memory_debug()
        set_memory_debug(True)
        assert memory_debug() is first
        with AsyncMemoryPool("simulated", name="mine") as pool:
            for _ in range(3):
                pool.allocate(5 * KIB).free()
            assert analyze_allocation_patterns().allocations == 3
            out = io.StringIO()
            dump_allocation_trace(file=out)
            assert "pool mine" in out.getvalue()
    finally:
        set_memory_debug(False)
    set_memory_debug(False)
    assert memory_debug() is None
