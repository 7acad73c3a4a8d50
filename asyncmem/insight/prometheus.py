"""`PoolCollector`: the figures of all pools for Prometheus, read when it asks. Needs the extra `prometheus`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Final, TypeVar, final

from asyncmem.pool.open_pool import open_pools
from asyncmem.stats import PoolStats
from asyncmem.text import printable

try:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
    from prometheus_client.registry import Collector
except ModuleNotFoundError as missing:
    raise ModuleNotFoundError(
        "asyncmem.insight.prometheus needs prometheus-client: pip install 'asyncmem[prometheus]'", name=missing.name
    ) from missing

__all__ = ["PoolCollector"]

Family = TypeVar("Family", CounterMetricFamily, GaugeMetricFamily)

# What goes up and down: the metric, its figure in `PoolStats`, and its words.
_GAUGES: Final = (
    ("limit_bytes", "limit", "The most that the pool may reserve."),
    ("allocated_bytes", "allocated_bytes", "Held by buffers, rounded up."),
    ("active_bytes", "active_bytes", "Held by buffers, as they were asked for."),
    ("cached_bytes", "cached_bytes", "Reserved and held by no buffer."),
    ("reserved_bytes", "reserved_bytes", "Taken from the driver and not given back."),
    ("inactive_split_bytes", "inactive_split_bytes", "Free in segments that are partly in use."),
    ("pending_fence_bytes", "pending_fence_bytes", "Free, but a stream may still be working on it."),
    ("exported_bytes", "exported_bytes", "Freed, and kept for arrays that were made from it."),
    ("pinned_bytes", "pinned_bytes", "Held in place by pins."),
    ("spilled_bytes", "spilled_bytes", "Of marked buffers, on the host now."),
    ("captured_bytes", "captured_bytes", "Freed, and kept for captured graphs."),
    ("largest_hole_bytes", "largest_hole", "The largest request that free memory can serve."),
    ("peak_allocated_bytes", "peak_allocated", "Highest allocated bytes since the peaks were reset."),
    ("peak_cached_bytes", "peak_cached", "Highest cached bytes since the peaks were reset."),
    ("peak_reserved_bytes", "peak_reserved", "Highest reserved bytes since the peaks were reset."),
    ("device_memory_bytes", "total_memory", "What the device has altogether."),
    ("device_free_bytes", "free_memory", "What the device had free when the pool last looked."),
    ("buffers", "active_buffers", "Buffers alive."),
    ("segments", "segments", "Segments taken from the driver and not given back."),
    ("waiting_requests", "waiting", "Requests that wait for other holders of memory."),
    ("waiting_bytes", "waiting_bytes", "What those ask for."),
    ("longest_wait_seconds", "longest_wait", "The longest time that one of them has waited."),
    ("growing_requests", "growing", "Requests that wait for memory to come from the device."),
    ("growing_bytes", "growing_bytes", "What those ask for."),
    ("pressure_level", "pressure", "Of allocated bytes against the limit, from 0 (low) to 3 (critical)."),
    ("fragmentation_ratio", "fragmentation", "Share of free memory that is outside the largest hole."),
)

# What only grows, without the "_total" that each name ends with.
_COUNTS: Final = (
    ("allocations", "num_allocations", "Buffers handed out."),
    ("frees", "num_frees", "Buffers freed."),
    ("misses", "num_cache_misses", "Allocations that found no memory ready."),
    ("driver_calls", "driver_calls", "Calls to the device's driver."),
    ("grows", "grows", "Segments taken from the driver."),
    ("trims", "trims", "Segments given back to the driver."),
    ("waits", "waits", "Requests that had to wait for other holders of memory."),
    ("wait_seconds", "wait_seconds", "Time that those have waited."),
    ("growth_waits", "growth_waits", "Requests that waited for growth alone."),
    ("growth_seconds", "growth_seconds", "Time that those have waited."),
    ("bypassed_bytes", "bypassed_bytes", "Granted to smaller requests past a larger one."),
    ("handed_back", "handed_back", "Grants whose request had been cancelled in the same moment."),
    ("timeouts", "timeouts", "Requests whose deadline passed."),
    ("cancellations", "cancellations", "Requests cancelled while they waited."),
    ("deadlocks", "deadlocks", "Requests refused because all would have waited for each other."),
    ("late_fences", "late_fences", "Memory taken behind a fence that was recorded only then."),
    ("loop_blocking_calls", "loop_blocking_calls", "Synchronous calls that held up an event loop."),
    ("cpu_fallbacks", "cpu_fallbacks", "Buffers placed on the host because the device was out."),
    ("spills", "spills", "Marked buffers that moved to the host."),
    ("returns", "returns", "Marked buffers that came back to be used."),
)
_LARGEST: Final = {"largest_hole", "total_memory", "free_memory", "longest_wait", "pressure", "fragmentation"}
"""Figures that are not added up over pools of one name: the largest is taken."""

_OF_BUDGETS: Final = {
    "limit", "allocated_bytes", "active_bytes", "peak_allocated", "active_buffers", "waiting", "waiting_bytes",
    "growing", "growing_bytes", "longest_wait", "num_allocations", "num_frees", "num_cache_misses", "waits",
    "wait_seconds", "growth_waits", "growth_seconds", "timeouts", "cancellations", "deadlocks",
}  # fmt: skip
"""Figures that budgets have of their own."""


@final
class PoolCollector(Collector):
    """Returns the figures of all pools of the process that have memory, and of their budgets.

    Register it once: ``prometheus_client.REGISTRY.register(PoolCollector())``. Nothing is counted meanwhile: it reads
    `pool.stats()` when it is asked, from any thread. Pools of one name on one device are added up, so give pools and
    budgets names if they are to be told apart. A counter begins anew with `reset_stats()` and with a pool of the same
    name.
    """

    def collect(self) -> Iterator[Metric]:
        """Return each metric with a sample for each pool or budget; without one where there is none."""
        pools: dict[tuple[str, ...], list[PoolStats]] = {}
        budgets: dict[tuple[str, ...], list[PoolStats]] = {}
        for opened in open_pools():
            stats = opened.pool.stats()
            at: tuple[str, ...] = printable(stats.name), printable(stats.device)
            pools.setdefault(at, []).append(stats)
            for stats in opened.budget_stats():
                budgets.setdefault((*at, printable(stats.name)), []).append(stats)
        of_budgets = (
            [one for one in _GAUGES if one[1] in _OF_BUDGETS],
            [one for one in _COUNTS if one[1] in _OF_BUDGETS],
        )
        yield from _families(GaugeMetricFamily, "pool", _GAUGES, pools)
        yield from _families(CounterMetricFamily, "pool", _COUNTS, pools)
        yield from _families(GaugeMetricFamily, "budget", of_budgets[0], budgets, "budget")
        yield from _families(CounterMetricFamily, "budget", of_budgets[1], budgets, "budget")
        hits, remedies = Counter[tuple[str, ...]](), Counter[tuple[str, ...]]()
        for at, found in pools.items():
            for one in found:
                hits.update({(*at, level): getattr(one, f"hits_{level}") for level in ("stream", "shared", "mapped")})
                remedies.update({(*at, printable(name)): count for name, count in one.remedies.items()})
        words = "Allocations served from memory that the pool had, by what served them."
        yield _family(CounterMetricFamily, "pool_hits", words, hits, "level")
        words = "Remedies for a lack of memory that were used, by name."
        yield _family(CounterMetricFamily, "pool_remedies", words, remedies, "remedy")


def _families(
    kind: type[Family], prefix: str, metrics: Iterable[tuple[str, str, str]],
    found: Mapping[tuple[str, ...], list[PoolStats]], *further: str,
) -> Iterator[Family]:  # fmt: skip
    for name, figure, words in metrics:
        together = max if figure in _LARGEST else sum
        samples = {at: together(getattr(one, figure) or 0 for one in several) for at, several in found.items()}
        yield _family(kind, f"{prefix}_{name}", words, samples, *further)


def _family(
    kind: type[Family], name: str, words: str, samples: Mapping[tuple[str, ...], float], *further: str
) -> Family:
    unit = next((unit for unit in ("bytes", "seconds", "ratio") if name.endswith(f"_{unit}")), "")
    family = kind(f"asyncmem_{name}", words, labels=("pool", "device", *further), unit=unit)
    for labels, value in samples.items():
        family.add_metric(labels, value)
    return family
