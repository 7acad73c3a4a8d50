"""`PoolCollector`: the figures of all pools for Prometheus, read when it asks. Needs the extra `prometheus`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple, final

from asyncmem.pool.open_pool import open_pools
from asyncmem.text import printable

try:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
    from prometheus_client.registry import Collector
except ModuleNotFoundError as missing:
    raise ModuleNotFoundError(
        "asyncmem.insight.prometheus needs prometheus-client: pip install 'asyncmem[prometheus]'", name=missing.name
    ) from missing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from prometheus_client.core import Metric

    from asyncmem.stats import PoolStats

__all__ = ["PoolCollector"]

_PREFIX: Final = "asyncmem_pool_"
_LABELS: Final = ("pool", "device")


class _Gauge(NamedTuple):
    """What goes up and down, as it is named there."""

    name: str
    figure: str
    """Its name in `PoolStats`."""
    help: str
    together: Callable[[Iterable[float]], float] = sum
    """What pools that have the same name come to."""


class _Count(NamedTuple):
    """What only grows, as it is named there, without the "_total" that all of them end with."""

    name: str
    figures: dict[str, str]
    """Their names in `PoolStats`, by the value of the label; the only one by an empty text."""
    help: str
    label: str | None = None
    """What tells several apart."""


_GAUGES: Final = (
    _Gauge("limit_bytes", "limit", "The most that the pool may reserve."),
    _Gauge("allocated_bytes", "allocated_bytes", "Held by buffers, rounded up."),
    _Gauge("active_bytes", "active_bytes", "Held by buffers, as they were asked for."),
    _Gauge("cached_bytes", "cached_bytes", "Reserved and held by no buffer."),
    _Gauge("reserved_bytes", "reserved_bytes", "Taken from the driver and not given back."),
    _Gauge("inactive_split_bytes", "inactive_split_bytes", "Free in segments that are partly in use."),
    _Gauge("pending_fence_bytes", "pending_fence_bytes", "Free, but a stream may still be working on it."),
    _Gauge("exported_bytes", "exported_bytes", "Freed, and kept for arrays that were made from it."),
    _Gauge("pinned_bytes", "pinned_bytes", "Held in place by pins."),
    _Gauge("spilled_bytes", "spilled_bytes", "Of marked buffers, on the host now."),
    _Gauge("captured_bytes", "captured_bytes", "Freed, and kept for captured graphs."),
    _Gauge("largest_hole_bytes", "largest_hole", "The largest request that free memory can serve.", max),
    _Gauge("peak_allocated_bytes", "peak_allocated", "Highest allocated bytes since the peaks were reset."),
    _Gauge("peak_cached_bytes", "peak_cached", "Highest cached bytes since the peaks were reset."),
    _Gauge("peak_reserved_bytes", "peak_reserved", "Highest reserved bytes since the peaks were reset."),
    _Gauge("device_memory_bytes", "total_memory", "What the device has altogether.", max),
    _Gauge("device_free_bytes", "free_memory", "What the device had free when it was last asked.", max),
    _Gauge("buffers", "active_buffers", "Buffers alive."),
    _Gauge("segments", "segments", "Segments taken from the driver and not given back."),
    _Gauge("waiting_requests", "waiting", "Requests that wait for other holders of memory."),
    _Gauge("waiting_bytes", "waiting_bytes", "What those ask for."),
    _Gauge("longest_wait_seconds", "longest_wait", "The longest time that one of them has waited.", max),
    _Gauge("growing_requests", "growing", "Requests that wait for memory to come from the device."),
    _Gauge("growing_bytes", "growing_bytes", "What those ask for."),
    _Gauge("pressure_level", "pressure", "Of allocated bytes against the limit, from 0 (low) to 3 (critical).", max),
    _Gauge("fragmentation_ratio", "fragmentation", "Share of free memory that is outside the largest hole.", max),
)

_COUNTS: Final = (
    _Count("allocations", {"": "num_allocations"}, "Buffers handed out."),
    _Count("frees", {"": "num_frees"}, "Buffers freed."),
    _Count(
        "hits",
        {"stream": "hits_stream", "shared": "hits_shared", "mapped": "hits_mapped"},
        "Allocations served from memory that the pool had, by what served them.",
        "level",
    ),
    _Count("misses", {"": "num_cache_misses"}, "Allocations that found no memory ready."),
    _Count("driver_calls", {"": "driver_calls"}, "Calls to the device's driver."),
    _Count("grows", {"": "grows"}, "Segments taken from the driver."),
    _Count("trims", {"": "trims"}, "Segments given back to the driver."),
    _Count("waits", {"": "waits"}, "Requests that had to wait for other holders of memory."),
    _Count("wait_seconds", {"": "wait_seconds"}, "Time that those have waited."),
    _Count("growth_waits", {"": "growth_waits"}, "Requests that waited for growth alone."),
    _Count("growth_seconds", {"": "growth_seconds"}, "Time that those have waited."),
    _Count("bypassed_bytes", {"": "bypassed_bytes"}, "Granted to smaller requests past a larger one."),
    _Count("handed_back", {"": "handed_back"}, "Grants whose request had been cancelled in the same moment."),
    _Count("timeouts", {"": "timeouts"}, "Requests whose deadline passed."),
    _Count("cancellations", {"": "cancellations"}, "Requests cancelled while they waited."),
    _Count("deadlocks", {"": "deadlocks"}, "Requests refused because all would have waited for each other."),
    _Count("late_fences", {"": "late_fences"}, "Memory taken behind a fence that was recorded only then."),
    _Count("loop_blocking_calls", {"": "loop_blocking_calls"}, "Synchronous calls that held up an event loop."),
    _Count("cpu_fallbacks", {"": "cpu_fallbacks"}, "Buffers placed on the host because the device was out."),
    _Count("spills", {"": "spills"}, "Marked buffers that moved to the host."),
    _Count("returns", {"": "returns"}, "Marked buffers that came back to be used."),
)


@final
class PoolCollector(Collector):
    """Returns the figures of all pools of the process that have memory, with the labels `pool` and `device`.

    Register it once: ``prometheus_client.REGISTRY.register(PoolCollector())``. Nothing is counted meanwhile: it reads
    `pool.stats()` when it is asked, from any thread. Pools of one name on one device are added up, so give them names
    if they are to be told apart. A counter begins anew with `reset_stats()` and with a pool of the same name.
    """

    def collect(self) -> Iterator[Metric]:
        """Return each metric with a sample for each pool; without one where there is no pool."""
        found: dict[tuple[str, str], list[PoolStats]] = {}
        for opened in open_pools():
            stats = opened.pool.stats()
            found.setdefault((printable(stats.name), printable(stats.device)), []).append(stats)
        for gauge in _GAUGES:
            yield _gauge(gauge, found)
        for count in _COUNTS:
            yield _count(count, found)
        yield _rungs(found)


_Found = dict[tuple[str, str], "list[PoolStats]"]


def _gauge(gauge: _Gauge, found: _Found) -> GaugeMetricFamily:
    family = GaugeMetricFamily(_PREFIX + gauge.name, gauge.help, labels=_LABELS, unit=_unit(gauge.name))
    for labels, pools in found.items():
        family.add_metric(labels, gauge.together(getattr(one, gauge.figure) or 0 for one in pools))
    return family


def _count(count: _Count, found: _Found) -> CounterMetricFamily:
    names = (*_LABELS, count.label) if count.label else _LABELS
    family = CounterMetricFamily(_PREFIX + count.name, count.help, labels=names, unit=_unit(count.name))
    for labels, pools in found.items():
        for value, figure in count.figures.items():
            family.add_metric((*labels, value) if count.label else labels, sum(getattr(one, figure) for one in pools))
    return family


def _rungs(found: _Found) -> CounterMetricFamily:
    family = CounterMetricFamily(
        f"{_PREFIX}remedies", "Remedies for a lack of memory that were used, by name.", labels=(*_LABELS, "remedy")
    )
    for labels, pools in found.items():
        for remedy in sorted({name for one in pools for name in one.remedies}):
            family.add_metric((*labels, printable(remedy)), sum(one.remedies.get(remedy, 0) for one in pools))
    return family


def _unit(name: str) -> str:
    return next((unit for unit in ("bytes", "seconds", "ratio") if name.endswith(f"_{unit}")), "")
