"""Changes of the pressure level, as an async iterator."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Self

from asyncmem.pool.latch import Latch
from asyncmem.stats import Pressure

if TYPE_CHECKING:
    from asyncmem.pool.ports import Opened

_DWELL: Final = 0.1
"""Seconds that a lower level lasts before it is told. A higher one is told at once."""


class PressureChanges:
    """The levels as they change, for one reader: ``async for level in pool.pressure_changes()``.

    A rise is reported at once. A fall is reported after the level has stayed lower for a tenth of a second, as the
    highest of that time, so that a program on the border of two levels does not see each crossing. It ends with the
    pool.
    """

    def __init__(self, opened: Opened) -> None:
        """Begin with the level of this moment.

        Raises:
            PoolClosed: The pool is closed.
        """
        opened.need_open()
        level = Pressure(opened.core.scheduler.gauges()["pressure"])
        self._pool = opened
        self._told = level
        self._level = level
        self._rises: list[Pressure] = []  # to be told, each above the one before
        self._fallen: float | None = None  # since when it has been lower than what was told, and is to be told, last
        self._highest = level  # since then
        self.ended = False
        self._changed: Latch[None] = Latch()

    def put(self, level: Pressure | None) -> None:
        """Note a level, or None for the end."""
        if level is None:
            self.ended = True
        else:
            self._change(level)
        changed, self._changed = self._changed, Latch()
        changed()

    def _change(self, level: Pressure) -> None:
        self._level = level
        last = self._rises[-1] if self._rises else self._told
        if level >= last:
            self._fallen = None
            self._rises += [level] if level > last else []
        elif self._fallen is None:
            self._fallen, self._highest = self._pool.core.time, level
        else:
            self._highest = max(self._highest, level)

    def __aiter__(self) -> Self:
        """Return itself."""
        return self

    async def __anext__(self) -> Pressure:
        """Wait for the next change. Cancelled: it is not lost, and comes with the next call."""
        while True:
            changed = self._changed  # before looking, as another thread may change it meanwhile
            level = self._next()
            if level is not None:
                self._told = level
                return level
            if self.ended:
                raise StopAsyncIteration
            await changed.wait(None if self._fallen is None else self._fallen + _DWELL - self._pool.core.time)

    def _next(self) -> Pressure | None:
        """Return the next level to tell."""
        if self._rises:
            return self._rises.pop(0)
        now = self._pool.core.time
        if self._fallen is None or (now < self._fallen + _DWELL and not self.ended):
            return None
        level, self._highest = self._highest, self._level
        self._fallen = now if self._level < level else None
        return level
