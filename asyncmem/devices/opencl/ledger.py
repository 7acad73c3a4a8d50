"""What this process has of a device's memory. OpenCL counts it for nobody, and drivers give out more than there is."""

from __future__ import annotations

import threading
from typing import Final

from asyncmem.devices.pages import host_memory
from asyncmem.errors import OutOfMemoryError
from asyncmem.facts import OutOfMemoryFacts


class Ledger:
    """Counts what is taken of so many bytes."""

    def __init__(self, total: int, *, on_host: bool) -> None:
        """Begin with none taken; memory `on_host` is shared with everybody there."""
        self.total = total
        self._on_host = on_host
        self._taken = 0
        # Re-entrant: a finalizer may interrupt the holder on the same thread and give back.
        self._lock: Final = threading.RLock()

    def free(self) -> int:
        """Return the bytes that could still be taken (reads files, on the host)."""
        left = max(0, self.total - self._taken)
        return min(left, host_memory().free) if self._on_host else left

    def take(self, nbytes: int, device: str) -> int:
        """Count bytes that are about to be got, and return how many are free beside them.

        Raises:
            OutOfMemoryError: There are too few.
        """
        with self._lock:
            free = self.free()
            if nbytes > free:
                raise OutOfMemoryError(OutOfMemoryFacts(asked=nbytes, device=device, device_free=free))
            self._taken += nbytes
            return free - nbytes

    def give_back(self, nbytes: int) -> None:
        """Count bytes that are no longer there, or were not got."""
        with self._lock:
            self._taken -= nbytes
