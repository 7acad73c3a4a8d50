"""How much of a pool's life has gone into saving memory, and how much more may."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

    from asyncmem.readers import Patience


_LEAST: Final = 1e-4
"""Seconds; what is left of the patience is not worth a wait below that."""


class Lifetime:
    """The seconds since a pool was opened, and those of them that growth took longer for it. Used with the turn held.

    Attributes:
        clock: What tells the seconds.
        began: When the pool was opened, by that.
        waited: Seconds that growth has waited for fences rather than ask for new memory.
        moved: Seconds in which memory was had from elsewhere in the pool.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.began = clock()
        self.waited = 0.0
        self.moved = 0.0

    def may_wait(self, patience: Patience, age: float) -> float:
        """Answer the seconds that a request which has waited for `age` may wait yet, 0 for none."""
        most = patience.seconds - age
        if patience.share < math.inf:
            most = min(most, patience.share * self._passed() - self.waited)
        return most if most >= _LEAST else 0.0

    def may_move(self, share: float, grace: float = 0.0) -> bool:
        """Say whether moves have taken no more than a share of the life, and some seconds."""
        return self.moved <= grace + share * self._passed()

    def note_wait(self, started: float) -> None:
        """Count the time since then as waited."""
        self.waited += self.clock() - started

    def note_move(self, started: float) -> None:
        """Count the time since then as moved."""
        self.moved += self.clock() - started

    def _passed(self) -> float:
        return self.clock() - self.began
