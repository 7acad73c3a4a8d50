"""Prometheus reads the figures of pools, by its own rules for names and units."""

import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import fields
from types import SimpleNamespace

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.openmetrics import exposition
from prometheus_client.openmetrics.parser import text_string_to_metric_families as read_open_metrics
from prometheus_client.parser import text_string_to_metric_families

from asyncmem import AsyncMemoryPool, OutOfMemoryError, PoolStats
from asyncmem.insight import prometheus
from asyncmem.insight.prometheus import PoolCollector

MIB = 1 << 20

Samples = dict[str, dict[tuple[str, ...], float]]
"""By the metric's name, and by the values of its labels behind the pool's and the device's."""


@pytest.fixture
def registry() -> CollectorRegistry:
    found = CollectorRegistry(auto_describe=True)
    found.register(PoolCollector())
    return found


@pytest.fixture
def pool() -> Iterator[AsyncMemoryPool]:
    """One that has served, waited and refused."""
    with AsyncMemoryPool("simulated", name='my "pool"\n', limit="8 MiB") as found:
        held = [found.allocate("1 MiB", tag="held") for _ in range(3)]
        held.pop().free()
        found.allocate("1 MiB").free()
        with pytest.raises(OutOfMemoryError):
            found.allocate("9 MiB")
        yield found
        held.clear()


def samples(registry: CollectorRegistry, name: str, device: str = "simulated:0") -> Samples:
    """What the parser reads of a pool."""
    found: Samples = {}
    for family in text_string_to_metric_families(generate_latest(registry).decode()):
        for one in family.samples:
            if (one.labels["pool"], one.labels["device"]) == (name, device):
                assert family.documentation.endswith(".")
                further = tuple(value for label, value in one.labels.items() if label not in {"pool", "device"})
                assert further not in found.setdefault(one.name, {}), "each sample is there once"
                found[one.name][further] = one.value
    return found


def test_figures_are_those_of_the_pool(registry: CollectorRegistry, pool: AsyncMemoryPool) -> None:
    """As `pool.stats()` has them."""
    found = samples(registry, pool.name)
    stats = pool.stats()
    assert found["asyncmem_pool_limit_bytes"] == {(): 8 * MIB}
    assert found["asyncmem_pool_active_bytes"] == {(): 2 * MIB}
    assert found["asyncmem_pool_allocations_total"] == {(): 4}
    assert found["asyncmem_pool_frees_total"] == {(): 2}
    assert found["asyncmem_pool_buffers"] == {(): 2}
    assert found["asyncmem_pool_peak_allocated_bytes"] == {(): 3 * MIB}
    assert found["asyncmem_pool_pressure_level"] == {(): float(stats.pressure)}
    assert found["asyncmem_pool_fragmentation_ratio"] == {(): stats.fragmentation}
    hits = {("stream",): stats.hits_stream, ("shared",): stats.hits_shared, ("mapped",): stats.hits_mapped}
    assert found["asyncmem_pool_hits_total"] == hits
    assert sum(hits.values()) + found["asyncmem_pool_misses_total"][()] == 4
    assert found["asyncmem_pool_remedies_total"] == {(name,): count for name, count in stats.remedies.items()}
    assert any(stats.remedies.values())


def test_every_figure_is_there_once(registry: CollectorRegistry, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all that a pool counts; what follows from others is left out."""
    names = [one.name for one in fields(PoolStats) if one.name not in {"name", "device", "pressure", "remedies"}]
    stats = PoolStats(name="all", device="one", **{name: 1000 + at for at, name in enumerate(names)})
    pool = SimpleNamespace(stats=lambda: stats)
    monkeypatch.setattr(prometheus, "open_pools", lambda: [SimpleNamespace(pool=pool, budget_stats=list)])
    found = Counter(value for one in samples(registry, "all", "one").values() for value in one.values())
    assert [found[float(1000 + at)] for at in range(len(names))] == [1] * len(names)
    assert found.total() == len(names) + 2, "the pressure and the fragmentation"


def test_names_follow_prometheus_rules(registry: CollectorRegistry) -> None:
    """One prefix, snake case, base units at the end; what its parsers put there themselves is not in a name."""
    families = list(text_string_to_metric_families(generate_latest(registry).decode()))
    assert len(families) > 40
    for family in families:
        assert re.fullmatch(r"asyncmem_(pool|budget)_[a-z]+(_[a-z]+)*", family.name)
        assert not re.search("_(total|count|sum|bucket|info|created|ms|us|mib|kib|percent)$", family.name)
        assert family.type in {"counter", "gauge"}
    assert len({one.name for one in families}) == len(families)


@pytest.mark.usefixtures("pool")
def test_the_strict_parser_takes_it(registry: CollectorRegistry) -> None:
    """OpenMetrics knows units, and wants them in the names."""
    families = list(read_open_metrics(exposition.generate_latest(registry).decode()))
    units = {family.name: family.unit for family in families}
    assert units["asyncmem_pool_reserved_bytes"] == "bytes"
    assert units["asyncmem_pool_wait_seconds"] == "seconds"
    assert units["asyncmem_pool_fragmentation_ratio"] == "ratio"
    assert all(name.endswith(f"_{unit}") for name, unit in units.items() if unit)
    for unit in ("bytes", "seconds", "ratio"):
        assert all(units[name] == unit for name in units if name.endswith(f"_{unit}"))


def test_pools_of_one_name_are_added_up(registry: CollectorRegistry) -> None:
    """Each sample may be there once; what cannot be added is the larger."""
    with (
        AsyncMemoryPool("simulated", name="twin", limit="8 MiB") as one,
        AsyncMemoryPool("simulated", name="twin", limit="16 MiB") as other,
        AsyncMemoryPool("host", name="twin", limit="16 MiB") as elsewhere,
        one.allocate("8 MiB"),
        other.allocate("1 MiB"),
        elsewhere.allocate("2 MiB"),
    ):
        found = samples(registry, "twin")
        assert found["asyncmem_pool_limit_bytes"] == {(): 24 * MIB}
        assert found["asyncmem_pool_active_bytes"] == {(): 9 * MIB}
        assert found["asyncmem_pool_allocations_total"] == {(): 2}
        assert found["asyncmem_pool_pressure_level"] == {(): 3}
        memory = [pool.stats().total_memory for pool in (one, other)]
        assert found["asyncmem_pool_device_memory_bytes"] == {(): max(memory)}
        assert samples(registry, "twin", "host")["asyncmem_pool_active_bytes"] == {(): 2 * MIB}


def test_budgets_have_their_own_figures(registry: CollectorRegistry) -> None:
    """Each open budget is there by its name, with what it has of its own; those of one name are added up."""
    with AsyncMemoryPool("simulated", name="shared", limit="16 MiB") as pool:
        with (
            pool.budget("gold", limit="8 MiB") as gold,
            pool.budget("free", limit="4 MiB") as free,
            pool.budget("free", limit="2 MiB"),
            gold.allocate("3 MiB"),
            free.allocate("1 MiB"),
        ):
            found = samples(registry, "shared")
            assert found["asyncmem_budget_limit_bytes"] == {("gold",): 8 * MIB, ("free",): 6 * MIB}
            assert found["asyncmem_budget_active_bytes"] == {("gold",): 3 * MIB, ("free",): MIB}
            assert found["asyncmem_budget_allocations_total"] == {("gold",): 1, ("free",): 1}
            assert found["asyncmem_pool_active_bytes"] == {(): 4 * MIB}
            assert "asyncmem_budget_reserved_bytes" not in found
        assert "asyncmem_budget_limit_bytes" not in samples(registry, "shared")


def test_pools_that_have_nothing_are_not_there(registry: CollectorRegistry) -> None:
    """Neither one that was not opened, nor one that is closed; a process without pools is fine."""
    AsyncMemoryPool("simulated", name="idle")
    with AsyncMemoryPool("simulated", name="gone"):
        pass
    assert samples(registry, "idle") == {}
    assert samples(registry, "gone") == {}
    code = (
        "from prometheus_client import REGISTRY, generate_latest; from asyncmem.insight.prometheus import *; "
        "REGISTRY.register(PoolCollector()); print(b'# TYPE asyncmem_pool_reserved_bytes gauge' in generate_latest())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=True)
    assert done.stdout == "True\n"


def test_without_prometheus_it_says_what_to_install() -> None:
    """asyncmem itself does not need it."""
    code = (
        "import sys; sys.modules['prometheus_client'] = None; import asyncmem.insight\n"
        "try: import asyncmem.insight.prometheus\n"
        "except ModuleNotFoundError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=True)
    assert "pip install 'asyncmem[prometheus]'" in done.stdout
