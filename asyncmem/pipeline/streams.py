"""Streams that this package makes for itself: lent to one user after another, because a pool keeps all it has seen."""

from __future__ import annotations

import weakref
from collections import defaultdict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from asyncmem.devices import Device, Stream
    from asyncmem.pool.ports import Opened


class Lent:
    """Streams for one user, which others may have once that is gone.

    Work that is still queued on them does no harm: whoever has them next comes behind it.
    """

    def __init__(self, opened: Opened) -> None:
        self._opened = opened
        self._lent: list[tuple[str, Stream]] = []
        self.give_back = weakref.finalize(self, _give_back, weakref.ref(self._opened), self._lent)

    @property
    def device(self) -> Device:
        """Whose streams they are."""
        return self._opened.device

    def stream(self, name: str) -> Stream:
        """Return a stream of that name that nobody else has."""
        try:
            stream = _idle[self._opened][name].pop()
        except (KeyError, IndexError):
            stream = self._opened.device.create_stream(name)
        self._lent.append((name, stream))
        return stream


def _give_back(known: weakref.ref[Opened], lent: Iterable[tuple[str, Stream]]) -> None:
    opened = known()
    if opened is not None:
        idle = _idle.setdefault(opened, defaultdict(list))
        for name, stream in lent:
            idle[name].append(stream)


_idle: weakref.WeakKeyDictionary[Opened, defaultdict[str, list[Stream]]] = weakref.WeakKeyDictionary()
