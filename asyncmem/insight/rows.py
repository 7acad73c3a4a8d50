"""Rows of the logs of several pools: read, merged in the order of time, completed, and put right."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from asyncmem.core import LOG_ROW, Core, Kind, Witness, log_time_ns
from asyncmem.insight.names import PoolName
from asyncmem.pool.open_pool import OpenPool
from asyncmem.pool.snapshot import segment_infos
from asyncmem.stats import Pressure

ROW: Final = np.dtype([*LOG_ROW, ("pool", "<u2")])
"""A row of the core's log, and the number of its pool."""

NO_NUMBER: Final = (1 << 64) - 1
"""The number of an allocation in rows that are about none."""

MOST_FRAMES: Final = 128
"""Lines of a call that are kept at most."""

CUT: Final = "There was no memory for more records."

OUTCOMES: Final = {
    Kind.WAITED: ("granted", "cancelled", "timed out", "failed"),
    Kind.PRESSURE: tuple(level.name for level in Pressure),
}
"""What the level of a row stands for, by its kind; for allocations it is a `Level`."""

_BATCH: Final = 4096
"""Rows that are copied at a time: as long as that takes, the pool waits."""


class _Part(NamedTuple):
    """Rows of a pool that were read together."""

    rows: NDArray[np.void]
    lost: int  # so far, because they were not read in time
    cut: bool  # whether there was no memory for later ones


class RecordedPool:
    """One pool that is recorded, and what was read of it so far.

    Attributes:
        number: The pool's, in its recording.
        name: The pool's.
        core: The pool's.
        before: The rows of what was there at the beginning: segments and buffers.
        lost: Rows that are gone, so far.
        cut: Whether there was no memory for later ones.
    """

    def __init__(self, opened: OpenPool, number: int, witness: Witness, keep: int) -> None:
        self.number = number
        self.name = PoolName(opened.name, opened.device.name, opened.limit, opened.options.as_text())
        self.core: Core = opened.core
        self.lost = 0
        self.cut = False
        self._keep = keep
        self._kept: deque[NDArray[np.void]] = deque()
        self._count = 0  # rows of those
        self._dropped = 0
        self._last: NDArray[np.void] | None = None
        self._reserved = 0
        self.core.watch(witness)
        began = log_time_ns()
        self._reader, held = self.core.open_log(keep)
        self.before = np.concatenate((_segments(opened), self._of_pool(held)))
        self.before["pool"] = number
        self.before["time_ns"] = began

    def parts(self) -> Iterator[_Part]:
        """Take out the rows that have come since, in parts that block the pool no longer than an allocation takes."""
        if self._last is not None:
            return
        count = _BATCH
        while count == _BATCH:
            found = self.core.read_log(self._reader, _BATCH, consume=True)
            rows = self._of_pool(found.rows)
            count = len(rows)
            if count:
                yield _Part(rows, found.lost, found.cut)

    def collect(self) -> None:
        """Take out the rows that have come since, and keep the newest of all."""
        for part in self.parts():
            self._kept.append(part.rows)
            self._count += len(part.rows)
            self.lost, self.cut = part.lost + self._dropped, part.cut
        while self._kept and self._count - len(self._kept[0]) >= self._keep:
            oldest = len(self._kept.popleft())
            self._count -= oldest
            self._dropped += oldest
            self.lost += oldest

    def kept(self) -> NDArray[np.void]:
        """Return the rows that were collected."""
        return np.concatenate((np.empty(0, ROW), *self._kept))

    def held(self) -> NDArray[np.void]:
        """Return the rows of what is live now, or was at the end."""
        return self._of_pool(self.core.held()) if self._last is None else self._last

    def kept_by_block(self) -> NDArray[np.void]:
        """Return the rows of what is live now, or was at the end, and was allocated since the beginning."""
        before, held = self.before["number"][self.before["kind"] == Kind.HELD], self.held()
        return held[held["number"] > before.max()] if len(before) else held

    def outline(self) -> NDArray[np.void]:
        """Return `before` where its rows are followed by those kept; else buffers, and all that was reserved as one."""
        if not self.lost:
            return self.before
        rows = self.kept()
        change = rows["nbytes"].astype(np.int64) * ((rows["kind"] == Kind.GREW) * 1 - (rows["kind"] == Kind.TRIMMED))
        reserved = self._reserved if self._last is not None else self.core.reserved()
        segment = np.zeros(1, ROW)
        segment["kind"], segment["number"], segment["pool"] = Kind.GREW, NO_NUMBER, self.number
        segment["nbytes"] = max(reserved - int(change.sum()), 0)
        return np.concatenate((segment, self.before[self.before["kind"] != Kind.GREW]))

    def close(self) -> None:
        """End it; rows that were not taken out are lost."""
        self._last, self._reserved = self.held(), self.core.reserved()
        self.core.close_log(self._reader)
        self.core.unwatch()

    def _of_pool(self, rows: bytes) -> NDArray[np.void]:
        found = np.frombuffer(rows, LOG_ROW)
        whole = np.empty(len(found), ROW)
        whole[[name for name, _ in LOG_ROW]] = found
        whole["pool"] = self.number
        return whole


def _segments(opened: OpenPool) -> NDArray[np.void]:
    segments = segment_infos(opened)
    rows = np.zeros(len(segments), ROW)
    rows["nbytes"] = [one.nbytes for one in segments]
    # Memory in pages has no address in rows, only bytes, as their growth and trims.
    rows["address"] = [one.address if one.kind != "paged" else 0 for one in segments]
    rows["kind"] = Kind.GREW
    rows["number"] = NO_NUMBER
    return rows


def in_order(held: NDArray[np.void], rows: NDArray[np.void], began: int, *, lost: int = 0) -> NDArray[np.void]:
    """Return the rows of all pools by their times, with what was there before them at their beginning."""
    rows = rows[np.argsort(rows["time_ns"], kind="stable")]
    start = int(rows["time_ns"][0]) if lost and len(rows) else began
    segments = held[held["kind"] == Kind.GREW]
    segments["time_ns"] = start
    buffers = held[held["kind"] != Kind.GREW]
    return _balanced(np.concatenate((segments, _completed(rows, buffers, start))))


def bridged(rows: NDArray[np.void], held: NDArray[np.void], gaps: Sequence[tuple[int, int]]) -> NDArray[np.void]:
    """Return rows with those that can be inferred of the lost ones among them.

    What is not held at the end, and of whose free there is no row, was freed in a gap: the first one behind it. What is
    held and of whose allocation there is no row was allocated in one.

    Args:
        rows: What was read.
        held: All that was live at the end.
        gaps: Pools and times at which their records go on, behind some that are lost.
    """
    taken, ended = of_kinds(rows, Kind.ALLOCATED, Kind.HELD), of_kinds(rows, Kind.FREED, Kind.UNDONE)
    unheard = taken[~np.isin(identity_of(taken), identity_of(np.concatenate((held, ended))))]
    unseen = held[~np.isin(identity_of(held), identity_of(taken))]
    unseen["kind"] = Kind.ALLOCATED
    ends = _gap_behind(gaps, unheard["pool"], unheard["time_ns"] + 1)
    freed, ends = unheard[ends >= 0], ends[ends >= 0]
    freed["kind"], freed["span_ns"], freed["time_ns"] = Kind.FREED, ends - freed["time_ns"], ends
    come = unseen[_gap_behind(gaps, unseen["pool"], unseen["time_ns"]) >= 0]
    return np.concatenate((rows, freed, come))


def _gap_behind(gaps: Sequence[tuple[int, int]], pools: NDArray[Any], times: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return when the first gap of a pool is, of those not before a time; -1 where there is none."""
    known = np.array(sorted(gaps), np.int64)
    order = np.unique(known[:, 1])  # so that pool and time are one number
    keys = known[:, 0] << 32 | order.searchsorted(known[:, 1])
    at = keys.searchsorted(pools.astype(np.int64) << 32 | order.searchsorted(times))
    there = np.append(known, [[-1, -1]], axis=0)[at]
    found: NDArray[np.int64] = np.where(there[:, 0] == pools, there[:, 1], -1)
    return found


def of_kinds(rows: NDArray[np.void], *kinds: Kind) -> NDArray[np.void]:
    """Return the rows of some kinds."""
    return rows[np.isin(rows["kind"], kinds)]


def identity_of(rows: NDArray[np.void]) -> NDArray[np.uint64]:
    """Return which allocation each row is about: pools number theirs each from 0."""
    identity: NDArray[np.uint64] = rows["pool"].astype(np.uint64) << np.uint64(48) | rows["number"]
    return identity


def find(wanted: NDArray[Any], known: NDArray[Any]) -> tuple[NDArray[np.intp], NDArray[np.bool_]]:
    """Return where each wanted number is among those known, of which no two are equal, and whether it is there."""
    if not len(known):
        return np.zeros(len(wanted), np.intp), np.zeros(len(wanted), np.bool_)
    order = np.argsort(known, kind="stable")
    at = order[np.minimum(known[order].searchsorted(wanted), len(known) - 1)]
    return at, known[at] == wanted


def priority_of(waits: NDArray[np.void]) -> NDArray[np.int64]:
    """Return the priority of each wait, which its address has: 0, -1, 1, -2, ... are 0, 1, 2, 3, ... there."""
    spelled = waits["address"].astype(np.int64)
    priorities: NDArray[np.int64] = spelled >> 1 ^ -(spelled & 1)
    return priorities


def change_of(rows: NDArray[np.void], less: Kind) -> NDArray[np.int64]:
    """Return the bytes of each row, as a negative number where it is of the kind that takes away."""
    change = rows["nbytes"].astype(np.int64)
    change[rows["kind"] == less] *= -1
    return change


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
    known = of_kinds(rows, Kind.ALLOCATED, Kind.HELD)
    # The row of a free has all about its allocation; its time follows from how long the buffer was held.
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


def _balanced(rows: NDArray[np.void]) -> NDArray[np.void]:
    """Return rows in which growth and trims add up: all that goes was there before, and nothing comes twice.

    What a pool has from the device is listed a moment after its records begin. Memory that comes in that moment is
    listed and comes once more; memory on its way back to the device is not listed, and still goes.
    """
    at = np.flatnonzero((rows["kind"] == Kind.GREW) | (rows["kind"] == Kind.TRIMMED))
    if not len(at):
        return rows
    places = rows["address"][at]
    # Where it is not always known which memory it is, only the sum over the pool is.
    places[np.isin(rows["pool"][at], rows["pool"][at[places == 0]])] = 0
    order = np.lexsort((places, rows["pool"][at]))
    at, places = at[order], places[order]
    moves = rows[at]
    other = (np.diff(moves["pool"]) != 0) | (np.diff(places) != 0)
    came = moves["kind"] == Kind.GREW
    twice = np.flatnonzero(~other & came[:-1] & came[1:] & (moves["span_ns"][:-1] == 0) & (places[1:] != 0))
    change = np.where(came, 1, -1) * moves["nbytes"].astype(np.int64)
    change[twice] = 0
    firsts = np.flatnonzero(np.append(True, other))
    sums = np.cumsum(change)
    lowest = np.minimum.reduceat(sums, firsts) - (sums - change)[firsts]
    lacking = lowest < 0
    if not lacking.any() and not len(twice):
        return rows  # and no copy of what may be all of the memory there is
    unlisted = np.zeros(np.count_nonzero(lacking), rows.dtype)
    unlisted["kind"], unlisted["number"], unlisted["time_ns"] = Kind.GREW, NO_NUMBER, rows["time_ns"][0]
    unlisted["pool"], unlisted["address"] = moves["pool"][firsts[lacking]], places[firsts[lacking]]
    unlisted["nbytes"] = -lowest[lacking]
    return np.concatenate((unlisted, np.delete(rows, at[twice])))
