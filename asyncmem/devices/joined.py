"""A fence that is reached once several others are."""

import time
from collections.abc import Callable, Sequence

from asyncmem.devices.base import Fence


class Joined(Fence):
    """Stands for all of `parts`. It holds them, and asks one after another."""

    def __init__(self, parts: Sequence[Fence]) -> None:
        """Take the fences; none is fine and means that there is nothing to wait for."""
        self._parts = tuple(parts)
        self._relays: list[_Relay] = []

    def done(self) -> bool:
        """Tell whether every part is reached."""
        return all(part.done() for part in self._parts)

    def block(self, timeout: float | None = None) -> bool:
        """Wait on this thread for every part; False when `timeout` seconds passed first."""
        if timeout is None:
            return all(part.block() for part in self._parts)
        deadline = time.monotonic() + timeout
        return all(part.block(max(0.0, deadline - time.monotonic())) for part in self._parts)

    def notify(self, callback: Callable[[], None]) -> None:
        """Call back once, when the last part is reached."""
        relay = _Relay([part for part in self._parts if not part.done()], callback, self._relays)
        self._relays.append(relay)
        relay.step()

    def forget(self, callback: Callable[[], None]) -> None:
        """Drop a callback that has not run."""
        for relay in list(self._relays):
            if relay.callback == callback:
                relay.cancel()
                return


class _Relay:
    """Waits for one part after another, so that at any time only one of them knows of the callback."""

    def __init__(self, parts: list[Fence], callback: Callable[[], None], siblings: "list[_Relay]") -> None:
        self.callback = callback
        self._parts = parts
        self._siblings = siblings
        self._current: Fence | None = None

    def step(self) -> None:
        if self._parts:
            self._current = self._parts.pop()
            self._current.notify(self.step)
        elif self._leave():
            self.callback()

    def cancel(self) -> None:
        if self._leave() and self._current is not None:
            self._current.forget(self.step)

    def _leave(self) -> bool:
        # The last step and a cancellation may come from two threads at once; the list lets only one of them leave.
        try:
            self._siblings.remove(self)
        except ValueError:
            return False
        return True
