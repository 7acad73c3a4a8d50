"""When pools grew and gave back, when requests waited, when some were refused."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, final

import numpy as np

from asyncmem.core import Kind
from asyncmem.insight.pictures.thinning import PARTS, starts_of_parts

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from asyncmem.insight.records import Records


@final
@dataclass(frozen=True, kw_only=True)
class Moments:
    """Things that happened, those of one part of the time together."""

    times: NDArray[np.float64]
    """When the first of each part was, in seconds from the beginning,"""
    counts: NDArray[np.int64]
    """how many they were,"""
    nbytes: NDArray[np.int64]
    """their bytes together,"""
    largest: NDArray[np.int64]
    """and those of the largest."""


@final
@dataclass(frozen=True, kw_only=True)
class Spans:
    """Times during which requests waited, those that no screen would tell apart together."""

    starts: NDArray[np.float64]
    """When somebody began to wait, in seconds from the beginning,"""
    ends: NDArray[np.float64]
    """when nobody waited any more,"""
    counts: NDArray[np.int64]
    """how many waits there were in between,"""
    longest: NDArray[np.float64]
    """and how many seconds the longest took."""


@final
@dataclass(frozen=True, kw_only=True)
class Marks:
    """What goes below a timeline."""

    grew: Moments
    """Memory came from the device; what was there when recording began did not come then."""
    trimmed: Moments
    """Memory went back to it."""
    waits: Spans
    """Requests waited for others to free memory."""
    out_of_memory: Moments
    """Requests were refused."""


def marks(records: Records, parts: int = PARTS) -> Marks:
    """Answer what is to be marked over time, with no more marks than there are parts."""
    return Marks(
        grew=_moments(records, records.grown().rows, parts),
        trimmed=_moments(records, records.of(Kind.TRIMMED).rows, parts),
        waits=_spans(records, parts),
        out_of_memory=_moments(records, records.of(Kind.OUT_OF_MEMORY).rows, parts),
    )


def _moments(records: Records, rows: NDArray[np.void], parts: int) -> Moments:
    times = rows["time_ns"] - records.began
    starts = starts_of_parts(times, round(records.duration * 1e9), parts)
    nbytes = rows["nbytes"].astype(np.int64)
    return Moments(
        times=times[starts] / 1e9,
        counts=np.diff(starts, append=len(rows)),
        nbytes=np.add.reduceat(nbytes, starts) if len(starts) else nbytes,
        largest=np.maximum.reduceat(nbytes, starts) if len(starts) else nbytes,
    )


def _spans(records: Records, parts: int) -> Spans:
    rows = records.of(Kind.WAITED).rows
    ends = (rows["time_ns"] - records.began) / 1e9
    lengths = rows["span_ns"] / 1e9
    starts = np.maximum(ends - lengths, 0.0)
    order = np.argsort(starts, kind="stable")
    starts, ends, lengths = starts[order], ends[order], lengths[order]
    until = np.maximum.accumulate(ends) if len(ends) else ends
    apart = starts[1:] > until[:-1] + records.duration / parts
    first = np.flatnonzero(np.concatenate((np.ones(min(len(rows), 1), np.bool_), apart)))
    return Spans(
        starts=starts[first],
        ends=until[np.append(first[1:], len(rows)) - 1] if len(first) else ends,
        counts=np.diff(first, append=len(rows)),
        longest=np.maximum.reduceat(lengths, first) if len(first) else lengths,
    )
