"""Rows of several pools in one order, with what was there before them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from asyncmem.core import LOG_ROW, Kind

if TYPE_CHECKING:
    from numpy.typing import NDArray

ROW: Final = np.dtype([*((name, LOG_ROW[name]) for name in LOG_ROW.names or ()), ("pool", "<u2")])
"""A row of the core's log, and the number of the pool that it is of."""


def in_order(held: NDArray[np.void], rows: NDArray[np.void], began: int, *, lost: int = 0) -> NDArray[np.void]:
    """Answer the rows of all pools by their times, with what was there before them at their beginning."""
    rows = rows[np.argsort(rows["time_ns"], kind="stable")]
    start = int(rows["time_ns"][0]) if lost and len(rows) else began
    segments = held[held["kind"] == Kind.GREW]
    segments["time_ns"] = start
    buffers = held[held["kind"] != Kind.GREW]
    return np.concatenate((segments, _completed(rows, buffers, start)))


def identity_of(rows: NDArray[np.void]) -> NDArray[np.uint64]:
    """Answer which allocation each row is about: pools number theirs each from 0."""
    identity: NDArray[np.uint64] = rows["pool"].astype(np.uint64) << np.uint64(48) | rows["number"]
    return identity


def _completed(rows: NDArray[np.void], held: NDArray[np.void], began: int) -> NDArray[np.void]:
    """Put before rows what was live at their beginning and is not in them, and leave out what was undone.

    Args:
        rows: What was read, whose beginning may be lost.
        held: What was live at some time, and may be in the rows or not.
        began: When the rows begin.
    """
    kinds = rows["kind"]
    undone = rows[kinds == Kind.UNDONE]
    rows = rows[~np.isin(identity_of(rows), identity_of(undone)) | (kinds > Kind.HELD)]
    kinds = rows["kind"]
    known = rows[(kinds == Kind.ALLOCATED) | (kinds == Kind.HELD)]
    # The row of a free tells of its allocation all but when it was, and that it does by how long it was held.
    ended = rows[kinds == Kind.FREED]
    before = np.concatenate((held, ended))
    before = before[~np.isin(identity_of(before), identity_of(known))]
    _, first = np.unique(identity_of(before), return_index=True)
    before = before[first]
    before["kind"], before["time_ns"], before["span_ns"] = Kind.HELD, began, 0
    return np.concatenate((before, rows))
