"""`Tap`: one pool that is recorded, and what was read of it so far."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final

import numpy as np

from asyncmem.core import LOG_ROW, Kind, log_time_ns
from asyncmem.insight.names import PoolName
from asyncmem.insight.order import ROW
from asyncmem.insight.outline import NOBODY
from asyncmem.pool.snapshot import segment_infos

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from asyncmem.core import Core, Witness
    from asyncmem.pool.open_pool import OpenPool

_BATCH: Final = 4096
"""Rows that are copied at a time: as long as that takes, the pool waits."""


class Part:
    """Rows of a pool that were read together."""

    def __init__(self, rows: NDArray[np.void], lost: int, *, cut: bool) -> None:
        self.rows = rows
        self.lost = lost  # by the pool so far, because nobody read them in time
        self.cut = cut  # whether there was no memory for later ones


class Tap:
    """One pool that is recorded.

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
        self.name = PoolName(opened.name, opened.device.name, opened.limit)
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

    def parts(self) -> Iterator[Part]:
        """Take out what has come since, in parts that hold the pool up for no longer than an allocation may take."""
        if self._last is not None:
            return
        count = _BATCH
        while count == _BATCH:
            found = self.core.read_log(self._reader, _BATCH, consume=True)
            rows = self._of_pool(found.rows)
            count = len(rows)
            if count:
                yield Part(rows, found.lost, cut=found.cut)

    def collect(self) -> None:
        """Take out what has come since, and keep the newest of all that has come."""
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
        """Answer what was collected."""
        return np.concatenate((np.empty(0, ROW), *self._kept))

    def held(self) -> NDArray[np.void]:
        """Answer the rows of what is live now, or was at the end."""
        return self._of_pool(self.core.held()) if self._last is None else self._last

    def outline(self) -> NDArray[np.void]:
        """Answer `before` where its rows are followed by those kept; else buffers, and all that was reserved as one."""
        if not self.lost:
            return self.before
        rows = self.kept()
        change = rows["nbytes"].astype(np.int64) * ((rows["kind"] == Kind.GREW) * 1 - (rows["kind"] == Kind.TRIMMED))
        reserved = self._reserved if self._last is not None else self.core.reserved()
        segment = np.zeros(1, ROW)
        segment["kind"], segment["number"], segment["pool"] = Kind.GREW, NOBODY, self.number
        segment["nbytes"] = max(reserved - int(change.sum()), 0)
        return np.concatenate((segment, self.before[self.before["kind"] != Kind.GREW]))

    def close(self) -> None:
        """End it; what was not taken out is gone."""
        self._last, self._reserved = self.held(), self.core.reserved()
        self.core.close_log(self._reader)
        self.core.unwatch()

    def _of_pool(self, rows: bytes) -> NDArray[np.void]:
        found = np.frombuffer(rows, LOG_ROW)
        whole = np.empty(len(found), ROW)
        for name in LOG_ROW.names or ():
            whole[name] = found[name]
        whole["pool"] = self.number
        return whole


def _segments(opened: OpenPool) -> NDArray[np.void]:
    segments = segment_infos(opened)
    rows = np.zeros(len(segments), ROW)
    rows["nbytes"] = [one.nbytes for one in segments]
    # What lies in pages is told by its bytes alone, as their coming and going are.
    rows["address"] = [one.address if one.kind != "paged" else 0 for one in segments]
    rows["kind"] = Kind.GREW
    rows["number"] = NOBODY
    return rows
