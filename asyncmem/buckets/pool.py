"""`BucketPool`: buffers of any kind, kept by size for reuse."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Generic, TypeVar

from asyncmem.buckets._buckets import Buckets
from asyncmem.figures import format_count, format_size
from asyncmem.stats import Pressure
from asyncmem.units import MAX_SIZE, Size, parse_count, parse_size

T = TypeVar("T")

_MOST_BUFFERS = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketStats:
    """One look at a `BucketPool`: sizes in bytes, counters since it was made."""

    pooled_bytes: int
    """Kept, and not in use."""
    pooled_buffers: int
    """How many buffers that is."""
    used_bytes: int
    """Recorded or taken, and not returned."""
    active_buffers: int
    """How many buffers that is."""
    peak_bytes: int
    """The most that was used and kept together."""
    allocations: int
    """Buffers that were made because none was here."""
    hits: int
    """Calls of `try_get` that found one."""
    misses: int
    """Calls of `try_get` that found none."""
    drops: int
    """Buffers that were returned and not kept, or dropped later."""
    pressure: Pressure
    """How much of the limit is in use; LOW where there is none."""

    @property
    def hit_rate(self) -> float:
        """Hits among all calls of `try_get`, 0 to 1; 0 before the first."""
        asked = self.hits + self.misses
        return self.hits / asked if asked else 0.0


class BucketPool(Buckets[T], Generic[T]):
    """Buffers of any kind, kept in buckets by powers of two: bytearrays, numpy arrays, page-locked memory, files' maps.

    It makes none and looks into none: its user does, and says how large each is.

    ```python
    buffer = buffers.try_get(size)
    if buffer is None:
        buffer = bytearray(size)
        buffers.record_allocation(size)
    ...
    buffers.return_buffer(buffer, len(buffer))
    ```

    A buffer is found again for any size that it has room for and that lies in its bucket, between two powers of two.
    Every method may be called from any thread, and from finalizers.

    Args:
        max_pooled_per_bucket: Buffers that each bucket keeps at most.
        limit: Bytes in use and kept together beyond which what is returned is not kept; None for any.

    Attributes:
        max_pooled_per_bucket: As it was given.
        most: The limit, or the most that sizes may be.
        pooled_bytes, pooled_buffers: What is kept. These and the following are also in `stats()`, each explained.
        used_bytes, active_buffers: What is in use.
        peak_bytes: The most of both.
        allocations, hits, misses, drops: Counters.

    Raises:
        InvalidRequest: One of them cannot be right.
    """

    __slots__ = ("__weakref__",)  # without a dict its methods are found faster

    def __new__(cls, *, max_pooled_per_bucket: int = 8, limit: Size | None = None) -> BucketPool[T]:
        count = parse_count(max_pooled_per_bucket, what="max_pooled_per_bucket", most=_MOST_BUFFERS)
        most = MAX_SIZE if limit is None else parse_size(limit, what="limit")
        made = super().__new__(cls, count, most)
        assert isinstance(made, BucketPool)
        return made

    def __init__(self, *, max_pooled_per_bucket: int = 8, limit: Size | None = None) -> None:
        """All is done when it is made."""

    def __repr__(self) -> str:
        return (
            f"<asyncmem.BucketPool: {format_size(self.used_bytes)} in use, {format_size(self.pooled_bytes)} kept "
            f"in {format_count(self.pooled_buffers, 'buffer')}>"
        )

    @property
    def limit(self) -> int | None:
        """Bytes in use and kept together beyond which what is returned is not kept; None for any."""
        return None if self.most == MAX_SIZE else self.most

    @property
    def pressure(self) -> Pressure:
        """How much of the limit is in use; LOW where there is none."""
        if self.limit is None:
            return Pressure.LOW
        return Pressure.of(self.used_bytes / self.limit) if self.limit else Pressure.CRITICAL

    @property
    def hit_rate(self) -> float:
        """Hits among all calls of `try_get`, 0 to 1; 0 before the first."""
        return self.stats().hit_rate

    def shrink(self, keep: Size | None = None) -> int:
        """Drop buffers that are not in use, the largest first, and return how many bytes.

        Args:
            keep: Bytes that may stay; None for half of what is kept now.
        """
        return self.drop(self.pooled_bytes // 2 if keep is None else parse_size(keep, what="keep"))

    def clear(self) -> None:
        """Drop all buffers that are not in use. Those in use are not touched, and may be returned later."""
        self.drop()

    def stats(self) -> BucketStats:
        """Return the figures of this moment."""
        return BucketStats(**{field.name: getattr(self, field.name) for field in fields(BucketStats)})
