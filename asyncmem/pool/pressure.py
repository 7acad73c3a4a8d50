"""Pressure levels as they change, for those who adapt to them."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from asyncmem.pool.home import Parked, running_home
from asyncmem.stats import Pressure

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from asyncmem.core import Core
    from asyncmem.pool.flow import Flow
    from asyncmem.pool.home import Home, Sleeper


class PressureWatch:
    """Follows the live bytes of a pool by two marks in the core, so that the hit path pays two comparisons.

    Methods are called with the turn held, except `changes`.
    """

    def __init__(self, flow: Flow, core: Core) -> None:
        self._flow = flow
        self._core = core
        self._listeners: list[_Listener] = []
        self.level = Pressure.LOW
        self.free_low = 0

    def look(self) -> None:
        """Find the level, tell the listeners if it is another one, and set the marks anew."""
        limit = self._flow.supply.limit
        level = Pressure.of(self._core.live() / limit) if limit else Pressure.LOW
        if level is not self.level:
            self.level = level
            for listener in self._listeners:
                listener.put(level)
        low, high = level.band
        self._core.set_marks(int(low * limit), int(high * limit) if high < 1 else NEVER, self.free_low)

    def end(self) -> None:
        """End the iteration of all listeners."""
        for listener in self._listeners:
            listener.put(None)

    async def changes(self) -> AsyncIterator[Pressure]:
        """Give each new level as it comes; a slow listener sees every change, in order."""
        home = running_home(self._flow.home)
        assert home is not None, "an async generator runs on a loop"
        listener = _Listener(self._flow, home)
        with self._flow.turn:
            self._listeners.append(listener)
        try:
            while (level := await listener.get()) is not None:
                yield level
        finally:
            with self._flow.turn:
                self._listeners.remove(listener)


NEVER = (1 << 63) - 1


class _Listener:
    """A queue of levels with one reader. A place to park in."""

    deadline: float | None = None

    def __init__(self, flow: Flow, home: Home) -> None:
        self._flow = flow
        self._home = home
        self._levels: deque[Pressure | None] = deque()
        self._sleeper: Sleeper | None = None

    def put(self, level: Pressure | None) -> None:
        self._levels.append(level)
        if self._sleeper is not None:
            self._flow.owe(self._sleeper.wake)
            self._sleeper = None

    async def get(self) -> Pressure | None:
        if not self._levels:
            await Parked(self._home, self)
        return self._levels.popleft()

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
