"""Segments in stream order: from a memory pool of the driver's that only this device uses."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asyncmem.devices.gpu._calls import Context
    from asyncmem.devices.gpu.driver import Driver


@dataclass(slots=True)
class _Progress:
    freed: bool = False


class OrderedSegments:
    """Takes segments from one pool of the driver's. The caller makes the context current."""

    def __init__(self, driver: Driver, context: Context, peers: Sequence[int]) -> None:
        """Make the pool and a stream for frees.

        The pool keeps what is free until it is trimmed: otherwise the driver would give memory back whenever anybody
        synchronizes, and take it again at the next growth.
        """
        self._driver = driver
        self._context = context
        self._pool = driver.create_pool(context.device)
        self._lock = threading.RLock()
        try:
            if peers:
                self.grant(peers)
            self._frees = context.create_stream()
        except BaseException:
            driver.call("cuMemPoolDestroy", self._pool)
            raise

    def take(self, nbytes: int, stream: int) -> tuple[int, _Progress]:
        """Take memory that is usable in the order of `stream`. One call, however long a large one takes."""
        address = self._driver.call("cuMemAllocFromPoolAsync", nbytes, self._pool, stream, asked=nbytes)
        return int(address), _Progress()

    def give_back(self, address: int, token: object) -> None:
        """Free a segment and have the pool give back what it does not use; what was done of it is not done again."""
        assert isinstance(token, _Progress)
        with self._lock:
            if not token.freed:
                self._driver.call("cuMemFreeAsync", address, self._frees)
                token.freed = True
            # The stream has nothing but frees, so this is short; only then does the pool know the memory to be free.
            self._driver.call("cuStreamSynchronize", self._frees)
            self._driver.call("cuMemPoolTrimTo", self._pool, 0)

    def grant(self, peers: Sequence[int]) -> None:
        """Let other devices use all segments, later ones too."""
        self._driver.open_pool(self._pool, peers)

    def revoke(self, peers: Sequence[int]) -> None:
        """Take a grant back that somebody else could not carry out."""
        self._driver.open_pool(self._pool, peers, allowed=False)

    def close(self) -> None:
        """Destroy the pool; there is no segment any more."""
        self._driver.call("cuMemPoolDestroy", self._pool)
        self._context.destroy_stream(self._frees)
