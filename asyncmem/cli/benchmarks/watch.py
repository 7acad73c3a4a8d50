"""An asyncio loop that knows how long each of its callbacks held it."""

import asyncio
import time
from collections.abc import Callable
from contextvars import Context
from typing import TYPE_CHECKING, TypeVarTuple

if TYPE_CHECKING:
    from _typeshed import FileDescriptorLike

Ts = TypeVarTuple("Ts")


class WatchedLoop(asyncio.SelectorEventLoop):
    """Times whatever it runs: steps of tasks, wake-ups from other threads, readers.

    Only what passes through `call_soon`, `call_soon_threadsafe` and `add_reader` is seen, which is all that waiting
    for memory uses; timers are not.
    """

    def __init__(self) -> None:
        super().__init__()
        self._held_ns = 0
        self._started = 0

    def held_ns(self) -> int:
        """Answer the nanoseconds that callbacks have held the loop so far, the present one up to now included."""
        return self._held_ns + (time.perf_counter_ns() - self._started)

    def call_soon(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        """Schedule a callback, timed."""
        return super().call_soon(self._timed, callback, args, context=context)

    def call_soon_threadsafe(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        """Schedule a callback from another thread, timed."""
        return super().call_soon_threadsafe(self._timed, callback, args, context=context)

    def add_reader(self, fd: "FileDescriptorLike", callback: Callable[[*Ts], object], *args: *Ts) -> None:
        """Watch a file descriptor; its callback is timed."""
        super().add_reader(fd, self._timed, callback, args)

    def _timed(self, callback: Callable[[*Ts], object], args: tuple[*Ts]) -> None:
        self._started = time.perf_counter_ns()
        try:
            callback(*args)
        finally:
            self._held_ns += time.perf_counter_ns() - self._started
