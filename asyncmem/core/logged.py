"""What a heap's log says: the rows as they lie in memory, and what their numbers mean."""

import enum
from typing import Final

import numpy as np


class Kind(enum.IntEnum):
    """What a record tells."""

    ALLOCATED = 0
    """A buffer was handed out."""
    FREED = 1
    """A buffer's memory came back."""
    UNDONE = 2
    """An allocation came to nothing, and counts as never made."""
    HELD = 3
    """A buffer was there when recording began."""
    GREW = 4
    """Memory came from the device."""
    TRIMMED = 5
    """Memory went back to the device."""
    WAITED = 6
    """A request that had waited behind other holders of memory left the queue."""
    PRESSURE = 7
    """The pool's pressure changed."""
    OUT_OF_MEMORY = 8
    """A request was refused because there is no such memory."""


class Level(enum.IntEnum):
    """What served an allocation."""

    MISS = 0
    """Nothing at once: it stood in the queue, for growth or for others to free."""
    STREAM_CACHE = 1
    """The cache of its own stream."""
    SHARED_CACHE = 2
    """The cache that all streams share."""
    MAPPED = 3
    """Free memory that the pool had."""
    FOREIGN = 4
    """Memory of another stream, which its own was made to wait for."""


LOG_ROW: Final = np.dtype(
    [
        ("time_ns", "<i8"), ("nbytes", "<u8"), ("address", "<u8"), ("span_ns", "<i8"), ("number", "<u8"),
        ("site", "<u4"), ("task", "<u4"), ("tag", "<u2"), ("thread", "<u2"), ("stream", "<u2"),
        ("kind", "u1"), ("level", "u1"),
    ]
)  # fmt: skip
"""One row. `number` tells which allocation it is about; `span_ns` is what came before it: for an allocation from
asking to granting, for a free since the allocation, for the rest what it took."""
