"""What a pool says about itself: frozen records, all sizes in bytes, all times in seconds, all rates from 0 to 1."""

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Final, TypeAlias


class Pressure(enum.IntEnum):
    """How much of its limit a pool has handed out. Levels compare: `if level >= Pressure.HIGH`."""

    LOW = 0
    """Below 60 %."""
    MEDIUM = 1
    """From 60 % to below 80 %."""
    HIGH = 2
    """From 80 % to 95 %."""
    CRITICAL = 3
    """Above 95 %."""

    @classmethod
    def of(cls, share: float) -> "Pressure":
        """Name the level of a share of the limit, 0 to 1 (more than 1 is CRITICAL too)."""
        if share > 0.95:
            return cls.CRITICAL
        if share >= 0.8:
            return cls.HIGH
        return cls.MEDIUM if share >= 0.6 else cls.LOW

    @property
    def band(self) -> tuple[float, float]:
        """The shares between which this level lies: the first belongs to it, except 95 % which is still HIGH."""
        return _BANDS[self]

    def __str__(self) -> str:
        """Return the level's name; the number is for comparing."""
        return self.name

    def __format__(self, spec: str) -> str:
        """Format the level's name."""
        return format(self.name, spec)


_BANDS: Final = ((0.0, 0.6), (0.6, 0.8), (0.8, 0.95), (0.95, 1.0))

Figure: TypeAlias = int | float | str | Mapping[str, int] | None
"""One value of `PoolStats.as_dict()`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolStats:
    """One look at a pool, a budget or a lease: gauges of the moment, counters since it was made, peaks since a reset.

    A counter only grows. A budget or lease fills in what it has of its own; the rest is zero.
    """

    name: str = ""
    """The pool's, budget's or lease's name."""
    device: str = ""
    """Name of the device, such as "cuda:0"."""
    limit: int | None = None
    """The most that may be reserved (pool) or live (budget, lease); None where only the device bounds it."""
    pressure: Pressure = Pressure.LOW
    """Level of `allocated_bytes` against the limit."""

    allocated_bytes: int = 0
    """Held by buffers, rounded up to the core's granule."""
    active_bytes: int = 0
    """Held by buffers, as they were asked for; what `allocated_bytes` has more is rounding."""
    cached_bytes: int = 0
    """Reserved and held by no buffer: `reserved_bytes` less `allocated_bytes`."""
    reserved_bytes: int = 0
    """Taken from the driver and not given back."""
    inactive_split_bytes: int = 0
    """Free, but in a segment of which another part is in use, so it cannot go back to the driver."""
    pending_fence_bytes: int = 0
    """Free, but a stream may still be working on it."""
    exported_bytes: int = 0
    """Freed by their owner, and kept until the last array made from them, or the last pin, is gone."""
    pinned_bytes: int = 0
    """Held in place by `pin()`: neither handed out again nor given back to the driver until they are unpinned."""
    spilled_bytes: int = 0
    """Of marked buffers, on the host now: no part of `allocated_bytes`."""
    captured_bytes: int = 0
    """Freed, and kept for the launches of captured graphs until their memory is released."""
    largest_hole: int = 0
    """The largest request that free memory can serve in one piece."""
    peak_allocated: int = 0
    """Highest `allocated_bytes` since the last reset of peaks."""
    peak_cached: int = 0
    """Highest `cached_bytes` since the last reset of peaks."""
    peak_reserved: int = 0
    """Highest `reserved_bytes` since the last reset of peaks."""
    total_memory: int = 0
    """What the device has altogether."""
    free_memory: int = 0
    """What the device had free, outside this pool, when the pool last looked: before it grew, or at rest."""

    active_buffers: int = 0
    """Buffers alive now."""
    segments: int = 0
    """Segments taken from the driver and not given back."""
    num_allocations: int = 0
    """Buffers handed out; each of a batch counts."""
    num_frees: int = 0
    """Buffers freed, by `free()`, by leaving a block or by being dropped."""
    hits_stream: int = 0
    """Allocations served by the cache of their own stream."""
    hits_shared: int = 0
    """Allocations served by the cache that all streams share."""
    hits_mapped: int = 0
    """Allocations placed in free memory that the pool already had."""
    num_cache_misses: int = 0
    """Allocations that found no memory ready: the pool had to grow, take over another stream's memory, or wait."""
    driver_calls: int = 0
    """Calls to the device's driver on behalf of this pool."""
    grows: int = 0
    """Segments taken from the driver."""
    trims: int = 0
    """Segments given back to the driver."""

    waiting: int = 0
    """Requests that wait for other holders of memory now."""
    waiting_bytes: int = 0
    """What they ask for together."""
    growing: int = 0
    """Requests within every limit that wait for memory to come from the device now."""
    growing_bytes: int = 0
    """What they ask for together."""
    waits: int = 0
    """Requests that had to wait for other holders of memory."""
    wait_seconds: float = 0.0
    """Time that those spent waiting, added up over the ones that have ended."""
    longest_wait: float = 0.0
    """The longest that one of them waited."""
    growth_waits: int = 0
    """Requests that waited for growth alone."""
    growth_seconds: float = 0.0
    """Time that those spent, added up over the ones that have ended."""
    bypassed_bytes: int = 0
    """Granted to smaller requests past a larger one at the head of the queue."""
    handed_back: int = 0
    """Grants that came back because their request had been cancelled in the same moment."""
    timeouts: int = 0
    """Requests whose deadline passed."""
    cancellations: int = 0
    """Requests cancelled while they waited."""
    deadlocks: int = 0
    """Requests refused with `DeadlockError`."""
    late_fences: int = 0
    """Memory of another stream taken behind a fence that was recorded only then, and so covers later work as well."""
    loop_blocking_calls: int = 0
    """Synchronous calls on an event loop's thread, which waited there for the device."""
    cpu_fallbacks: int = 0
    """Buffers placed on the host because the device was out (`fallback="host"`)."""
    spills: int = 0
    """Marked buffers that moved to the host (`pool.spillable(...)`)."""
    returns: int = 0
    """How often one of them came back to be used."""
    remedies: Mapping[str, int] = field(default_factory=dict)
    """How often each means against a lack of memory was used, by its name."""

    @property
    def num_cache_hits(self) -> int:
        """Allocations served from memory that the pool already had, without waiting and without a driver call."""
        return self.hits_stream + self.hits_shared + self.hits_mapped

    @property
    def misses_stream(self) -> int:
        """Allocations that the cache of their own stream could not serve."""
        return self.hits_shared + self.misses_shared

    @property
    def misses_shared(self) -> int:
        """Those of them that the shared cache could not serve either."""
        return self.hits_mapped + self.num_cache_misses

    @property
    def cache_hit_rate(self) -> float:
        """Share of hits among hits and misses; 1 before the first."""
        return _rate(self.num_cache_hits, self.num_cache_hits + self.num_cache_misses)

    @property
    def efficiency_score(self) -> float:
        """Share of hits among the allocations granted; 1 before the first."""
        return _rate(self.num_cache_hits, self.num_allocations)

    @property
    def memory_efficiency(self) -> float:
        """Share of the reserved memory that buffers hold; 1 while nothing is reserved."""
        return _rate(self.allocated_bytes, self.reserved_bytes)

    @property
    def fragmentation(self) -> float:
        """Share of the free memory that lies outside the largest hole; 0 while nothing is free."""
        return 1.0 - _rate(self.largest_hole, self.cached_bytes)

    def as_dict(self) -> dict[str, Figure]:
        """Return every field and every derived figure by its name, ready for JSON; the pressure as its name."""
        names = [one.name for one in fields(self)] + list(DERIVED)
        figures: dict[str, Figure] = {name: getattr(self, name) for name in names}
        return figures | {"pressure": self.pressure.name, "remedies": dict(self.remedies)}


DERIVED: Final = tuple(name for name, one in vars(PoolStats).items() if isinstance(one, property))
"""The figures of `PoolStats` that are computed from others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WaiterInfo:
    """One request in the queue, in the order in which they stand there."""

    owner: str
    """Name of the task that made it, or what `pool.owner(...)` named."""
    nbytes: int
    """What it asks for; for a batch the sum."""
    age: float
    """Seconds since it was made."""
    held: int = 0
    """Bytes its owner holds by `with`, `async with`, a lease or `pool.owner(...)`."""
    tag: str | None = None
    """The tag it was made with."""
    priority: int = 0
    """The priority it was made with; larger goes first."""
    remaining: float | None = None
    """Seconds until its deadline, or None where it has none."""
    growing: bool = False
    """Whether it waits for growth alone, and not for other holders of memory."""
    share: str = ""
    """Name of the pool, the budget or the lease in whose queue it stands."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentInfo:
    """One range of device memory that the pool has from the driver."""

    address: int
    """Where it starts on the device."""
    nbytes: int
    """Its length."""
    kind: str
    """How it was obtained: one of the device's `segment_kinds`, or "paged"."""
    arena: str
    """What it serves: "small", "large" or a lease's name."""
    live: int
    """Bytes of it that buffers hold."""
    largest_hole: int
    """Its longest free range."""


def _rate(part: int, whole: int) -> float:
    # A snapshot reads its figures one after another, so a part may be ahead of its whole for a moment.
    return min(part / whole, 1.0) if whole > 0 else 1.0
