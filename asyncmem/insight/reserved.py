"""How much pools had from the device, over time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from asyncmem.core import Kind

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from asyncmem.insight.records import Records


def reserved(records: Records) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Answer what is reserved after each growth and trim: times in nanoseconds from the beginning, and bytes."""
    rows = records.of(Kind.GREW, Kind.TRIMMED).rows
    change = rows["nbytes"].astype(np.int64)
    change[rows["kind"] == Kind.TRIMMED] *= -1
    return rows["time_ns"] - records.began, np.cumsum(change)


def most_reserved(records: Records) -> int:
    """Answer the most bytes that were had from the device at once."""
    return int(reserved(records)[1].max(initial=0))
