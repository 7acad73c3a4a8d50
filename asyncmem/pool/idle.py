"""Giving memory back that nobody has had a use for in a while."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from asyncmem.errors import DeviceError

if TYPE_CHECKING:
    from collections.abc import Callable

    from asyncmem.pool.flow import Flow


class IdleWatch:
    """Notes when a pool was used last: looked at a few times a second, it costs those who allocate nothing.

    Args:
        flow: The pool's way of requests.
        clock: Tells the time in seconds.
    """

    def __init__(self, flow: Flow, clock: Callable[[], float] = time.monotonic) -> None:
        self._flow = flow
        self._clock = clock
        self._used = -1
        self._since = clock()
        self._shrunk = False

    def look(self) -> None:
        """Give free segments back if nothing was allocated or freed for `shrink_after` (blocks); once, until it is."""
        flow = self._flow
        after = flow.options.shrink_after
        if after is None:
            return
        counts = flow.core.counts()
        used, now = counts.allocations + counts.frees, self._clock()
        if used != self._used:
            self._used, self._since, self._shrunk = used, now, False
        elif now - self._since >= after and not self._shrunk and flow.closed is None:
            self._shrunk = True
            try:
                flow.upkeep.trim(keep=flow.supply.ready)
            except DeviceError as error:
                flow.fail(None, error)
