"""Which segments go back to the device in place of one that comes, before more is reserved than ever.

A program whose sizes change leaves segments behind that are wholly free, and too small for what it asks for next. Kept,
they add up: a program that works on another number of rows each time has had three times what it needs. Given back,
they cost a call each, and another one should they be missed. So that is done only as the most reserved would rise, only
with what is done with, and for a small share of the pool's life.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Final

from asyncmem.errors import DeviceError

if TYPE_CHECKING:
    from asyncmem.core import Core
    from asyncmem.engine.retire import Entry, Retire
    from asyncmem.pool.lifetime import Lifetime

    EmptySegment = tuple[int, int, int, tuple[Entry, ...]]
    """Number, address, bytes, and what its last uses were."""

_SHARE: Final = 0.02
"""Of the pool's life; beyond that the most reserved may rise. In a replay, too: core/replay.cpp."""

_WATCHED: Final = 256
"""Large frees that have a fence of their own after segments were free that could have gone, had it been known."""

_UNEVEN: Final = 8
"""How many times as large as what comes a segment may be that goes; in a replay, too."""


class Exchange:
    """Chooses for one pool: with its turn held, but for `look`, which calls the device."""

    def __init__(self, core: Core, retire: Retire, lifetime: Lifetime) -> None:
        self._core = core
        self._retire = retire
        self._lifetime = lifetime

    def uses(self, nbytes: int, over: int) -> list[Entry]:
        """Answer what to wait for, so that `over` bytes can go back for `nbytes` that come; nothing if all is done."""
        found: list[Entry] = []
        for _, _, size, entries in self._candidates(nbytes):
            if over > 0:
                over -= size
                found += entries
        return found

    def look(self, nbytes: int) -> None:
        """Record fences behind the uses of what could go back for `nbytes` that come, and see which are done."""
        streams = {stream for *_, entries in self._candidates(nbytes) for stream, _ in entries}
        if not streams:
            return
        self._retire.be_eager(_WATCHED)  # by the next time it is known of more what is done with
        for index in streams:
            with suppress(DeviceError):  # whoever waits for it is told
                self._retire.fence(index)
        with suppress(DeviceError):
            self._retire.poll()

    def ready(self, nbytes: int) -> set[int]:
        """Answer the numbers of the segments that may go back at once for `nbytes` that come."""
        return {number for number, _, _, entries in self._candidates(nbytes) if not entries}

    def _candidates(self, nbytes: int) -> list[EmptySegment]:
        found = [one for one in self._core.empty_segments() if one[2] <= _UNEVEN * nbytes]
        found.sort(key=lambda one: -one[2])
        return found if found and self._lifetime.may_move(_SHARE) else []
