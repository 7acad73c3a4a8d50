"""Statistics: rates between 0 and 1, derived figures that agree with what they come from, names other tools know."""

import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncmem.stats import DERIVED, PoolStats, Pressure

counts = st.integers(0, 1 << 50)

# The names that users of other memory managers look for.
KNOWN = {
    "allocated_bytes",
    "cached_bytes",
    "reserved_bytes",
    "inactive_split_bytes",
    "active_bytes",
    "cache_hit_rate",
    "num_allocations",
    "num_cache_hits",
    "num_cache_misses",
    "peak_allocated",
    "peak_cached",
    "num_frees",
    "active_buffers",
    "total_memory",
    "free_memory",
    "memory_efficiency",
    "efficiency_score",
}


def test_the_names_other_tools_know_are_there() -> None:
    """Dashboards written for other memory managers find their figures."""
    assert set(PoolStats().as_dict()) >= KNOWN


def test_the_dictionary_has_every_figure_and_is_ready_for_json() -> None:
    """Fields and derived figures are all in it, in plain types."""
    figures = PoolStats(name="p", pressure=Pressure.HIGH, remedies={"merge": 2}).as_dict()
    assert set(figures) == {one.name for one in dataclasses.fields(PoolStats)} | set(DERIVED)
    back = json.loads(json.dumps(figures))
    assert (back["pressure"], back["remedies"], back["name"]) == ("HIGH", {"merge": 2}, "p")


def test_derived_figures_are_the_properties() -> None:
    """The list of derived figures is complete."""
    assert set(DERIVED) == {name for name, one in vars(PoolStats).items() if isinstance(one, property)}


@given(counts, counts, counts, counts)
def test_hits_and_misses_agree_by_level(stream: int, shared: int, mapped: int, missed: int) -> None:
    """What one level misses, the next ones answer or miss."""
    stats = PoolStats(hits_stream=stream, hits_shared=shared, hits_mapped=mapped, num_cache_misses=missed)
    assert stats.misses_stream == shared + mapped + missed
    assert stats.misses_shared == mapped + missed
    assert stats.num_cache_hits == stream + shared + mapped
    assert stats.num_cache_hits + stats.num_cache_misses == stats.hits_stream + stats.misses_stream


@given(st.tuples(*[counts] * 7))
def test_rates_lie_between_zero_and_one(numbers: tuple[int, ...]) -> None:
    """A rate is a share whatever the counters say, also in a snapshot taken while they move."""
    allocated, reserved, hole, cached, hits, misses, allocations = numbers
    stats = PoolStats(
        allocated_bytes=allocated,
        reserved_bytes=reserved,
        largest_hole=hole,
        cached_bytes=cached,
        hits_stream=hits,
        num_cache_misses=misses,
        num_allocations=allocations,
    )
    for rate in (stats.cache_hit_rate, stats.efficiency_score, stats.memory_efficiency, stats.fragmentation):
        assert 0 <= rate <= 1


def test_rates_of_nothing_are_perfect() -> None:
    """A pool that has done nothing has wasted nothing."""
    idle = PoolStats()
    assert (idle.cache_hit_rate, idle.efficiency_score, idle.memory_efficiency, idle.fragmentation) == (1, 1, 1, 0)


def test_rates_are_what_their_names_say() -> None:
    """Allocated per reserved, hits per allocation, free memory outside the largest hole."""
    stats = PoolStats(
        allocated_bytes=300,
        reserved_bytes=400,
        cached_bytes=100,
        largest_hole=25,
        hits_stream=6,
        num_cache_misses=2,
        num_allocations=10,
    )
    assert (stats.memory_efficiency, stats.efficiency_score, stats.cache_hit_rate) == (0.75, 0.6, 0.75)
    assert stats.fragmentation == 0.75


@pytest.mark.parametrize(
    ("share", "level"),
    [
        (0.0, Pressure.LOW),
        (0.5999, Pressure.LOW),
        (0.6, Pressure.MEDIUM),
        (0.7999, Pressure.MEDIUM),
        (0.8, Pressure.HIGH),
        (0.95, Pressure.HIGH),
        (0.9501, Pressure.CRITICAL),
        (1.5, Pressure.CRITICAL),
    ],
)
def test_pressure_levels_have_these_bounds(share: float, level: Pressure) -> None:
    """Below 60 %, 60 to 80 %, 80 to 95 %, above 95 %."""
    assert Pressure.of(share) is level


@given(st.floats(0, 1))
def test_pressure_bands_hold_their_shares(share: float) -> None:
    """A level's band is where its shares lie, so that watermarks set from it fire when the level changes."""
    low, high = Pressure.of(share).band
    assert low <= share <= high


def test_pressure_levels_compare() -> None:
    """Levels have an order."""
    assert Pressure.LOW < Pressure.MEDIUM < Pressure.HIGH < Pressure.CRITICAL


def test_pressure_levels_print_as_their_names() -> None:
    """A message shows the word and not the number."""
    assert (str(Pressure.HIGH), f"{Pressure.HIGH:>6}") == ("HIGH", "  HIGH")
