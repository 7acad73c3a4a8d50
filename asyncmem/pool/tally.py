"""What happened to requests since the pool began; read by the statistics."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from asyncmem.pool.waiting import Waiting


class Tally:
    """Counters of one pool, budget or lease, changed under the pool's turn; the names are those of `PoolStats`."""

    def __init__(self) -> None:
        self.misses = 0
        self.waits = 0
        self.wait_seconds = 0.0
        self.longest_wait = 0.0
        self.handed_back = 0
        self.timeouts = 0
        self.cancellations = 0
        self.deadlocks = 0
        self.loop_blocking_calls = 0
        self.cpu_fallbacks = 0
        self.rungs: Counter[str] = Counter()

    def queued(self) -> None:
        """Count a request that has to wait."""
        self.waits += 1

    def left(self, waiting: Waiting) -> None:
        """Count the end of a wait, whatever it was."""
        self.wait_seconds += waiting.age
        self.longest_wait = max(self.longest_wait, waiting.age)
