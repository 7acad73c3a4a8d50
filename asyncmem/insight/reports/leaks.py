"""`leaks`: what was allocated and never freed, by the lines that did."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, final

import numpy as np

from asyncmem.core import Kind
from asyncmem.insight.names import Site
from asyncmem.insight.reports.parts import parts

if TYPE_CHECKING:
    from asyncmem.insight.records import Records


class Leak(NamedTuple):
    """A line that allocated what was never freed."""

    file: str
    """Its file,"""
    line: int
    """its number in that,"""
    function: str
    """and the function that it is in; empty, 0 and empty where no line is known."""
    nbytes: int
    """Bytes of its buffers that were still live at the end,"""
    buffers: int
    """how many they are,"""
    age: float
    """and for how many seconds the oldest of them was."""
    tags: tuple[str, ...]
    """What they were allocated under."""
    pools: tuple[str, ...]
    """Where."""


@final
@dataclass(frozen=True, kw_only=True)
class Leaks:
    """What was never freed."""

    nbytes: int
    """Bytes of it,"""
    buffers: int
    """in how many buffers."""
    lines: tuple[Leak, ...]
    """By lines, the most bytes first."""


def leaks(records: Records) -> Leaks:
    """Answer what was allocated while it was recorded, and was still live at the end.

    What was there before the recording began is not in it: nobody knows what it was for.
    """
    live = records.live_at().of(Kind.ALLOCATED)
    rows, names = live.rows, records.names
    end = records.began + round(records.duration * 1e9)
    found: dict[Site, Leak] = {}
    for number, those in parts(rows, "site"):
        site = names.site(number) or Site("", 0, "")
        before = found.get(site, Leak(*site, 0, 0, 0.0, (), ()))
        tags = {tag for one in np.unique(those["tag"]).tolist() if (tag := names.tag(one))}
        pools = {names.pools[one].name for one in np.unique(those["pool"]).tolist()}
        found[site] = Leak(
            *site,
            before.nbytes + int(those["nbytes"].sum()),
            before.buffers + len(those),
            max(before.age, (end - int(those["time_ns"].min())) / 1e9),
            tuple(sorted({*before.tags, *tags})),
            tuple(sorted({*before.pools, *pools})),
        )
    largest_first = sorted(found.values(), key=lambda one: (-one.nbytes, one.file, one.line))
    return Leaks(nbytes=int(rows["nbytes"].sum()), buffers=len(rows), lines=tuple(largest_first))
