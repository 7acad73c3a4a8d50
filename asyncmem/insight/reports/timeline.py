"""`timeline`: how much was live and reserved, from the beginning to the end."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple, final

import numpy as np

from asyncmem.core import Kind
from asyncmem.errors import InvalidRequest
from asyncmem.insight.reserved import reserved

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from asyncmem.insight.records import Records

MOST_MOMENTS = 100_000


class Moment(NamedTuple):
    """A part of the time."""

    time: float
    """When it begins, in seconds from the beginning."""
    live: int
    """The most bytes that were live in it,"""
    reserved: int
    """and that were had from the device."""
    waits: int
    """How many requests left the queue in it."""
    out_of_memory: int
    """How many requests were refused in it."""


@final
@dataclass(frozen=True, kw_only=True)
class Timeline:
    """What was live and reserved over time."""

    seconds: float
    """How long was recorded."""
    peak: int
    """The most bytes that were live."""
    limit: int
    """The most bytes that the pools might reserve together."""
    moments: tuple[Moment, ...]
    """The time in parts of the same length."""


def timeline(records: Records, moments: int = 100) -> Timeline:
    """Answer how much was live and reserved over time.

    Args:
        records: What happened.
        moments: In how many parts the time is cut. In each the most is looked for, so that no peak is lost.

    Raises:
        InvalidRequest: No such number of parts.
    """
    if not 1 <= moments <= MOST_MOMENTS:
        raise InvalidRequest("moments", moments, f"a number from 1 to {MOST_MOMENTS:,}")
    end = max(round(records.duration * 1e9), 1)
    edges = np.linspace(0, end, moments + 1).astype(np.int64)
    edges[-1] += 1  # what happens at the very end is in the last part
    parts = zip(
        (edges[:-1] / 1e9).tolist(),
        _most(*records.live(), edges),
        _most(*reserved(records), edges),
        _count(records.of(Kind.WAITED), edges),
        _count(records.of(Kind.OUT_OF_MEMORY), edges),
        strict=True,
    )
    return Timeline(
        seconds=records.duration,
        peak=records.peak().nbytes,
        limit=sum(pool.limit for pool in records.names.pools),
        moments=tuple(Moment(*part) for part in parts),
    )


def _most(times: NDArray[np.int64], values: NDArray[np.int64], edges: NDArray[np.int64]) -> list[int]:
    """Answer the largest value that held in each part, that from before it included."""
    borders = np.searchsorted(times, edges).tolist()
    held = np.concatenate((np.zeros(1, np.int64), values))  # held[i] is what holds before the change i
    return [int(held[first : last + 1].max()) for first, last in pairwise(borders)]


def _count(records: Records, edges: NDArray[np.int64]) -> list[int]:
    counts: list[int] = np.histogram(records.rows["time_ns"] - records.began, edges)[0].tolist()
    return counts
