"""Changes of the pressure level, as an async iterator."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Self

from asyncmem.pool.loops import need_running_loop
from asyncmem.stats import Pressure

if TYPE_CHECKING:
    from asyncmem.pool.loops import Sleeper
    from asyncmem.pool.ports import Opened

_DWELL: Final = 0.1
"""Seconds that a lower level lasts before it is told. A higher one is told at once."""


class PressureChanges:
    """The levels as they change, for one reader: ``async for level in pool.pressure_changes()``.

    A rise is reported at once. A fall is reported after the level has stayed lower for a tenth of a second, as the
    highest of that time, so that a program on the border of two levels does not see each crossing. It ends with the
    pool.
    """

    deadline: float | None = None

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
        self._sleeper: Sleeper | None = None

    def put(self, level: Pressure | None) -> None:
        """Note a level, or None for the end."""
        if level is None:
            self.ended = True
        else:
            self._change(level)
        sleeper, self._sleeper = self._sleeper, None
        if sleeper is not None:
            sleeper.wake()

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
            level = self._next()
            if level is not None:
                self._told = level
                return level
            if self.ended:
                raise StopAsyncIteration
            await need_running_loop(self, self._pool.core.loop).park(self)

    def _next(self) -> Pressure | None:
        """Return the next level to tell; else set the deadline at which there may be one."""
        self.deadline = None
        if self._rises:
            return self._rises.pop(0)
        if self._fallen is None:
            return None
        now = self._pool.core.time
        if now < self._fallen + _DWELL and not self.ended:
            self.deadline = self._fallen + _DWELL
            return None
        level, self._highest = self._highest, self._level
        self._fallen = now if self._level < level else None
        return level

    def admit(self, sleeper: Sleeper) -> bool:
        if self.ended or self._rises or (self._fallen is not None and self.deadline is None):
            return False
        self._sleeper = sleeper
        return True

    def abandon(self, sleeper: Sleeper) -> None:  # noqa: ARG002  # there is only one
        self._sleeper = None

    def expire(self) -> None:
        """Look again: a lower level has lasted."""
        sleeper, self._sleeper = self._sleeper, None
        if sleeper is not None:
            sleeper.wake()
