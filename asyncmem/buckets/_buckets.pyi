"""Stub of the compiled buckets; `BucketPool` is what users hold."""

from typing import Generic, TypeVar

from asyncmem.units import Size

_T = TypeVar("_T")

class Buckets(Generic[_T]):
    """Buffers of any kind, by powers of two. Sizes are bytes; no call runs others' code while it changes this."""

    max_pooled_per_bucket: int
    most: int
    pooled_bytes: int
    used_bytes: int
    peak_bytes: int
    pooled_buffers: int
    active_buffers: int
    hits: int
    misses: int
    allocations: int
    drops: int
    def __new__(cls, max_pooled_per_bucket: int, most: int) -> Buckets[_T]: ...
    def try_get(self, size: Size, /) -> _T | None: ...
    def return_buffer(self, buffer: _T, size: Size, /) -> bool: ...
    def record_allocation(self, size: Size, /) -> None: ...
    def drop(self, keep: Size | None = None, /) -> int: ...
