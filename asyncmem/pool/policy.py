"""A pool's options as the heap and the scheduler take them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from asyncmem.core import HeapOptions
    from asyncmem.devices import Device
    from asyncmem.options import PoolOptions

_APART = 8
"""Pages that streams may have free beside each other in the smallest pool, as a segment holds them."""


_AS_GIVEN = (
    "segment_size", "ready", "late_fences", "overlap", "bypass", "max_waiting", "merge_threshold", "defragment",
    "adaptive", "shrink_after",
)  # fmt: skip
"""The options that the scheduler takes as they are."""


def heap_settings(options: PoolOptions) -> HeapOptions:
    """Return what the heap is told; a pool without pooling caches no blocks."""
    blocks = 0 if options.segments == "direct" else 1
    return {
        "small_limit": max(blocks * options.small_limit, 1),  # direct: every request has a segment of its own
        "strategy": options.strategy,
        "stream_cache_blocks": blocks * options.stream_cache_blocks,
        "stream_cache_bytes": options.stream_cache_bytes,
        "shared_cache_blocks": blocks * options.shared_cache_blocks,
        "shared_cache_bytes": options.shared_cache_bytes,
    }


def scheduler_settings(options: PoolOptions, device: Device, limit: int) -> dict[str, Any]:
    """Return what the scheduler is told."""
    paged = options.segments == "paged"
    return {
        **heap_settings(options),
        **{name: getattr(options, name) for name in _AS_GIVEN},
        "limit": limit,
        "limited": options.limit is not None,
        "paged": paged,
        "direct": options.segments == "direct",
        "granularity": device.granularity,
        "page": device.page,
        "overlap_least": _APART * device.page if paged else 0,
        "patience": options.patience.seconds,
        "patience_share": options.patience.share,
        "fallback": options.fallback is not None,
    }
