"""What one process found out about one allocator in one row, before anybody compares it."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from asyncmem.cli.benchmarks.result import Timing

Figure = float | int | str


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One figure with the floor beside it."""

    row: str
    case: str = ""
    """Which part of the row, where it has several."""
    peer: str
    unit: str = "ns"
    """Of the figures that follow: "ns", or "" for a ratio."""
    min: float
    median: float
    floor: float | None = None
    """What `object()`, or whatever the row says, took in the same process; the minimum of its repeats."""
    beside: float | None = None
    """The minimum of asyncmem, doing the same in the same process in turn with this peer, where that was measured."""
    unlike: str | None = None
    """What this peer does differently, where it is not the same work."""
    figures: Mapping[str, Figure] = field(default_factory=dict)
    """Whatever else the row needs, each with its unit in its name."""
    broken: str = ""
    """A promise that did not hold, in words."""


def timed(
    row: str,
    peer: str,
    ours: Timing,
    floor: Timing | None = None,
    *,
    case: str = "",
    beside: Timing | None = None,
    unlike: str | None = None,
    **figures: Figure,
) -> Measured:
    """Make the usual figure: one side's times, and the floor's."""
    return Measured(
        row=row,
        case=case,
        peer=peer,
        min=ours.ns,
        median=ours.median_ns,
        floor=None if floor is None else floor.ns,
        beside=None if beside is None else beside.ns,
        unlike=unlike,
        figures=figures,
    )
