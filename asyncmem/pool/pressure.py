"""Pressure levels as they change, for those who adapt to them."""

from __future__ import annotations

import math
import weakref
from collections import deque
from typing import TYPE_CHECKING, Self

from asyncmem.core import Kind
from asyncmem.pool.home import Parked, running_home
from asyncmem.stats import Pressure

if TYPE_CHECKING:
    from asyncmem.core import Core
    from asyncmem.pool.flow import Flow
    from asyncmem.pool.home import Sleeper


class PressureWatch:
    """Follows the live bytes of a pool by two marks in the core, so that the hit path pays two comparisons.

    Methods are called with the turn held, except `changes`.
    """

    def __init__(self, flow: Flow, core: Core) -> None:
        self._flow = flow
        self._core = core
        self._listeners: weakref.WeakSet[PressureChanges] = weakref.WeakSet()
        self.level = Pressure.LOW
        self.free_low = 0

    def look(self) -> None:
        """Find the level, tell the listeners if it is another one, and set the marks anew."""
        while True:
            level = self._now()
            if level is not self.level:
                self.level = level
                if self._core.logged:
                    self._core.note(Kind.PRESSURE, level, self._core.live())
                for listener in self._listeners:
                    listener.put(level)
                self._flow.squeeze.feel(level)
            self._set_marks(level)
            # Others free and take meanwhile; what they changed before the marks were set nobody has told.
            if self._now() is level:
                return

    def _now(self) -> Pressure:
        limit = self._flow.supply.limit
        return Pressure.of(self._core.live() / limit) if limit else Pressure.LOW

    def _set_marks(self, level: Pressure) -> None:
        limit = self._flow.supply.limit
        low, high = level.band
        self._core.set_marks(math.ceil(low * limit), int(high * limit) if high < 1 else NEVER, self.free_low)

    def end(self) -> None:
        """End the iteration of all listeners."""
        for listener in self._listeners:
            listener.put(None)

    def changes(self) -> PressureChanges:
        """Give each new level as it comes; a slow listener sees every change, in order."""
        listener = PressureChanges(self._flow)
        with self._flow.turn:
            self._listeners.add(listener)
        return listener


NEVER = (1 << 63) - 1


class PressureChanges:
    """The levels as they change, for one reader: ``async for level in pool.pressure_changes()``.

    It hears changes from the time when it was made, until it is dropped or the pool is closed. A place to park in.
    """

    deadline: float | None = None

    def __init__(self, flow: Flow) -> None:
        self._flow = flow
        self._levels: deque[Pressure | None] = deque()
        self._sleeper: Sleeper | None = None

    def put(self, level: Pressure | None) -> None:
        """Hear a level, or None for the end (with the turn held)."""
        self._levels.append(level)
        if self._sleeper is not None:
            self._flow.owe(self._sleeper.wake)
            self._sleeper = None

    def __aiter__(self) -> Self:
        """Answer itself."""
        return self

    async def __anext__(self) -> Pressure:
        """Wait for the next change. Cancelled: it is not lost, and comes with the next call."""
        home = running_home(self._flow.home)
        assert home is not None, "an async for loop runs on an event loop"
        while not self._levels:
            await Parked(home, self)
        level = self._levels.popleft()
        if level is None:
            raise StopAsyncIteration
        return level

    def admit(self, sleeper: Sleeper) -> bool:
        with self._flow.turn:
            if not self._levels:
                self._sleeper = sleeper
            return not self._levels

    def abandon(self, sleeper: Sleeper) -> None:  # noqa: ARG002 -- there is only one
        with self._flow.turn:
            self._sleeper = None

    def expire(self) -> None:
        """Never called: a listener has no deadline."""
