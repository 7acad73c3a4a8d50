"""How long the event loop lets a ready callback wait: the stalls that everything else on the loop would feel."""

import asyncio
import math
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Final, Self

INTERVAL: Final = 0.005


class Ticker:
    """Puts a callback on the running loop every few milliseconds and notes how late it runs.

    A thread of its own does so. A task that sleeps could not tell: loops round their timers up to a millisecond.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._lateness: list[int] = []
        self._excused_ns = 0
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="asyncmem demo ticker", daemon=True)

    @property
    def longest(self) -> float:
        """The longest stall so far, in seconds."""
        return max(self._lateness, default=0) / 1e9

    @property
    def p99(self) -> float:
        """What 99 of 100 ticks did not exceed, in seconds."""
        ordered = sorted(self._lateness)
        return ordered[math.ceil(0.99 * len(ordered)) - 1] / 1e9 if ordered else 0.0

    @contextmanager
    def excused(self) -> Iterator[None]:
        """Leave out what runs inside: the demonstration's own drawing is not what is measured."""
        start = time.perf_counter_ns()
        try:
            yield
        finally:
            self._excused_ns += time.perf_counter_ns() - start

    async def __aenter__(self) -> Self:
        # Starting and joining a thread take a moment, and this loop's moments are what is measured.
        await asyncio.to_thread(self._thread.start)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopping = True
        await asyncio.to_thread(self._thread.join)

    def _run(self) -> None:
        while not self._stopping:
            self._loop.call_soon_threadsafe(self._tick, time.perf_counter_ns(), self._excused_ns)
            time.sleep(INTERVAL)

    def _tick(self, posted: int, excused: int) -> None:
        late = time.perf_counter_ns() - posted - (self._excused_ns - excused)
        self._lateness.append(max(late, 0))
