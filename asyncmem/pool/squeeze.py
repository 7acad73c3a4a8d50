"""Keeping little in caches while most of the limit is handed out, and more again once it is not."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final

from asyncmem.stats import Pressure

if TYPE_CHECKING:
    from asyncmem.pool.flow import Flow

CACHED: Final = 4
"""The part of their bytes that caches may keep while memory is short."""


class Squeeze:
    """What a pool does about pressure. It begins at `Pressure.HIGH` and ends at `Pressure.LOW`.

    What caches hold serves one size and cannot join its neighbours, which costs nothing where there is room, and a wait
    or a growth where there is none. Between the two levels all stays as it is, or a program that lives on their border
    would have its caches emptied again and again.
    """

    def __init__(self, flow: Flow) -> None:
        self._flow = flow
        self.on = False

    def feel(self, level: Pressure) -> None:
        """Hear of the level of pressure (with the turn held); the worker does what there is to do."""
        wanted = self._flow.options.adaptive and (level >= Pressure.HIGH or (self.on and level > Pressure.LOW))
        if wanted is not self.on:
            self.on = wanted
            self._flow.owe(partial(self._flow.submit, self._adapt))

    def fit_caches(self) -> None:
        """Tell the core what its caches may keep (with the turn held)."""
        options, part = self._flow.options, CACHED if self.on else 1
        self._flow.core.configure(
            stream_cache_bytes=options.stream_cache_bytes // part,
            shared_cache_bytes=options.shared_cache_bytes // part,
        )

    def _adapt(self) -> None:
        with self._flow.turn:
            self.fit_caches()
            self._flow.upkeep.defragment()
            self._flow.changed()
