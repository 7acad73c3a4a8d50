"""`waits`: for how long requests waited for others to free memory, by the lines that made them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, final

import numpy as np

from asyncmem.core import Kind
from asyncmem.insight.groups import naming
from asyncmem.insight.reports.parts import parts

if TYPE_CHECKING:
    from asyncmem.insight.records import Records

_GRANTED = 0  # how a wait ended, as a record's `outcome` says


class WaitingLine(NamedTuple):
    """A line whose requests waited for others to free memory."""

    name: str
    """The line; "?" where none is known."""
    waits: int
    """How often,"""
    seconds: float
    """for how long together,"""
    longest: float
    """and the longest time."""
    given_up: int
    """How many of them were not granted: cancelled, timed out or failed."""


@final
@dataclass(frozen=True, kw_only=True)
class Waits:
    """Who waited for memory."""

    waits: int
    """How often anybody did,"""
    seconds: float
    """and for how long together."""
    lines: tuple[WaitingLine, ...]
    """Who, the longest first."""


def waits(records: Records) -> Waits:
    """Answer who waited for memory, and for how long. A wait that still goes on at the end is not in it."""
    rows = records.of(Kind.WAITED).rows
    spell = naming(records.names, "site")
    lines: dict[str, WaitingLine] = {}
    for number, those in parts(rows, "site"):
        spans, name = those["span_ns"], spell(number) or "?"
        before = lines.get(name, WaitingLine(name, 0, 0.0, 0.0, 0))
        lines[name] = WaitingLine(
            name,
            before.waits + len(those),
            before.seconds + int(spans.sum()) / 1e9,
            max(before.longest, int(spans.max()) / 1e9),
            before.given_up + int(np.count_nonzero(those["level"] != _GRANTED)),
        )
    longest_first = sorted(lines.values(), key=lambda one: (-one.seconds, one.name))
    return Waits(waits=len(rows), seconds=int(rows["span_ns"].sum()) / 1e9, lines=tuple(longest_first))
