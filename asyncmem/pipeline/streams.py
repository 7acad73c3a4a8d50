"""Streams that this package makes for itself: lent to one user after another, because a pool keeps all it has seen."""

from __future__ import annotations

import weakref
from collections import defaultdict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from asyncmem.devices import Device, Stream
    from asyncmem.pool import AsyncMemoryPool
    from asyncmem.pool.house import House


class Lent:
    """Streams for one user, which others may have once that is gone.

    Work that is still queued on them does no harm: whoever has them next comes behind it.
    """

    def __init__(self, pool: AsyncMemoryPool) -> None:
        self._house = pool.house
        self._lent: list[tuple[str, Stream]] = []
        self.give_back = weakref.finalize(self, _give_back, weakref.ref(self._house), self._lent)

    @property
    def device(self) -> Device:
        """Whose streams they are."""
        return self._house.device

    def stream(self, name: str) -> Stream:
        """Answer a stream of that name that nobody else has."""
        try:
            stream = _idle[self._house][name].pop()
        except (KeyError, IndexError):
            stream = self._house.device.create_stream(name)
        self._lent.append((name, stream))
        return stream


def _give_back(house_of: weakref.ref[House], lent: Iterable[tuple[str, Stream]]) -> None:
    house = house_of()
    if house is not None:
        idle = _idle.setdefault(house, defaultdict(list))
        for name, stream in lent:
            idle[name].append(stream)


_idle: weakref.WeakKeyDictionary[House, defaultdict[str, list[Stream]]] = weakref.WeakKeyDictionary()
