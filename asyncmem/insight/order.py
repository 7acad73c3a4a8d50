"""Rows of several pools in one order, with what was there before them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from asyncmem.core import LOG_ROW, Kind
from asyncmem.insight.outline import righted

if TYPE_CHECKING:
    from collections.abc import Iterable

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
    return righted(np.concatenate((segments, _completed(rows, buffers, start))))


def bridged(rows: NDArray[np.void], held: NDArray[np.void], gaps: Iterable[tuple[int, int]]) -> NDArray[np.void]:
    """Answer rows with what can be told of those that are lost among them.

    What is not held at the end, and of whose free there is no row, was freed in a gap: the first one behind it. What is
    held and of whose allocation there is no row was allocated in one.

    Args:
        rows: What was read.
        held: All that was live at the end.
        gaps: Pools and times at which their records go on, behind some that are lost.
    """
    taken = rows[(rows["kind"] == Kind.ALLOCATED) | (rows["kind"] == Kind.HELD)]
    ended = rows[(rows["kind"] == Kind.FREED) | (rows["kind"] == Kind.UNDONE)]
    unheard = taken[~np.isin(identity_of(taken), identity_of(np.concatenate((held, ended))))]
    unseen = held[~np.isin(identity_of(held), identity_of(taken))]
    unseen["kind"] = Kind.ALLOCATED
    found = [rows]
    for pool, time in sorted(gaps, key=lambda gap: gap[1]):
        gone = (unheard["pool"] == pool) & (unheard["time_ns"] < time)
        freed, unheard = unheard[gone], unheard[~gone]
        freed["kind"], freed["span_ns"], freed["time_ns"] = Kind.FREED, time - freed["time_ns"], time
        come = (unseen["pool"] == pool) & (unseen["time_ns"] <= time)
        found += [freed, unseen[come]]
        unseen = unseen[~come]
    return np.concatenate(found)


def identity_of(rows: NDArray[np.void]) -> NDArray[np.uint64]:
    """Answer which allocation each row is about: pools number theirs each from 0."""
    identity: NDArray[np.uint64] = rows["pool"].astype(np.uint64) << np.uint64(48) | rows["number"]
    return identity


def _completed(rows: NDArray[np.void], held: NDArray[np.void], began: int) -> NDArray[np.void]:
    """Put among rows what was live at their beginning, or came and is not in them, and leave out what was undone.

    Args:
        rows: What was read, whose beginning may be lost.
        held: What was live at some time, and may be in the rows or not.
        began: When the rows begin.
    """
    kinds = rows["kind"]
    undone = rows[kinds == Kind.UNDONE]
    if len(undone):
        rows = rows[~np.isin(identity_of(rows), identity_of(undone)) | (kinds > Kind.HELD)]
        kinds = rows["kind"]
    known = rows[(kinds == Kind.ALLOCATED) | (kinds == Kind.HELD)]
    # The row of a free tells of its allocation all but when it was, and that it does by how long it was held.
    ended = rows[kinds == Kind.FREED]
    ended["time_ns"] -= ended["span_ns"]
    before = np.concatenate((held, ended))
    before = before[~np.isin(identity_of(before), identity_of(known))]
    _, first = np.unique(identity_of(before), return_index=True)
    before = before[first]
    before["time_ns"] = np.where(before["kind"] == Kind.HELD, began, np.maximum(before["time_ns"], began))
    before["kind"], before["span_ns"] = Kind.HELD, 0
    together = np.concatenate((before, rows))
    return together[np.argsort(together["time_ns"], kind="stable")]
