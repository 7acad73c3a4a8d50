"""What happened to requests since the pool began; read by the statistics."""

from __future__ import annotations

from collections import Counter

from asyncmem.core import Waits


class Tally(Waits):
    """Counters of one pool, budget or lease, changed under the pool's turn; the names are those of `PoolStats`."""

    def __init__(self) -> None:
        self.handed_back = 0
        self.timeouts = 0
        self.cancellations = 0
        self.deadlocks = 0
        self.loop_blocking_calls = 0
        self.cpu_fallbacks = 0
        self.spills = 0
        self.returns = 0
        self.rungs: Counter[str] = Counter()
