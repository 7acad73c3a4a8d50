"""Devices whose copies matter, and what the tests of feeds do with them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from asyncmem import Array, AsyncMemoryPool
from asyncmem.devices import Latencies, Simulated, Stream

MIB = 1 << 20
LIMIT = 8 * MIB


class TimedDevice(Simulated):
    """A device whose copies from the host take time; where `locked`, only page-locked memory is copied by itself."""

    def __init__(self, seconds: float = 0.0, *, locked: bool = False) -> None:
        super().__init__(64 * MIB, latencies=Latencies.zero(), backing=True)
        self.seconds = seconds
        self.locked = locked
        self.copied: list[int] = []
        self.unlocked_in_threads: list[str] = []

    def copy_holds_up(self, host: memoryview, *, into: bool = False) -> bool:
        del into
        return self.locked and not self._pinned_part(np.frombuffer(host, np.uint8))

    def copy_in(self, address: int, source: memoryview, stream: Stream) -> None:
        self.copied.append(source.nbytes)
        if self.copy_holds_up(source):
            self.unlocked_in_threads.append(threading.current_thread().name)
            time.sleep(0.01)  # so that who does not wait for it comes too early
        self.stream_of(stream).launch(self.seconds, writes=[(address, source.nbytes)])
        super().copy_in(address, source, stream)


def read(array: Array, stream: Stream | None = None) -> np.ndarray[Any, Any]:
    """Return the values, by way of a stream; it need not be the home, but must be behind the data."""
    target = np.empty(array.shape, array.dtype)  # type: ignore[arg-type]  # no test reads short floats
    array.copy_to(target, stream=stream).block()
    return target


def feeding_threads() -> list[str]:
    """Return the names of threads that read or stage."""
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("asyncmem prefetch")]


def soon(holds: Callable[[], bool]) -> None:
    """Wait on this thread until something holds that another one brings about."""
    deadline = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < deadline, "it never came to hold"
        time.sleep(0.001)


def all_free(pool: AsyncMemoryPool) -> None:
    """Wait until nothing of a pool is held; what a thread has in hand it lets go of when it ends."""
    soon(lambda: pool.stats().allocated_bytes == 0)
    pool.check()
