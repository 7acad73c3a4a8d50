"""What a benchmark answers: times in nanoseconds, the floor beside them, and the bound its ratio has to meet."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import isfinite
from typing import TypeAlias

Number: TypeAlias = float | int | str
Json: TypeAlias = Mapping[str, "Number | bool | Json | None"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """One side of a comparison over several repeats."""

    ns: float
    """The fastest repeat: what the work costs when nothing interferes."""
    median_ns: float
    """The middle one: what it costs on this machine, as busy as it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One question answered."""

    question: str
    """What is measured, and against what."""
    bound: float
    """The most that `ratio` may be; infinite where it is only told."""
    ns: float
    floor_ns: float
    ns_median: float
    floor_median_ns: float
    ratio: float
    """What is held against the bound; `ns` over `floor_ns` unless the question says otherwise."""
    figures: Mapping[str, Number] = field(default_factory=dict)
    """Whatever else the question needs, each with its unit in its name."""
    cases: Mapping[str, "Row"] = field(default_factory=dict)
    """The row's parts, where it has several; the row itself then repeats the worst of them."""
    broken: str = ""
    """A promise besides the bound that did not hold, in words."""

    @property
    def met(self) -> bool:
        """Whether everything that the row promises held in this run."""
        return self.ratio <= self.bound and not self.broken

    def as_json(self) -> Json:
        """Answer a mapping for JSON."""
        line: dict[str, Number | bool | Json | None] = {
            "ns": round(self.ns, 2),
            "floor_ns": round(self.floor_ns, 2),
            "ratio": round(self.ratio, 3),
            "ns_median": round(self.ns_median, 2),
            "floor_median_ns": round(self.floor_median_ns, 2),
            "bound": self.bound if isfinite(self.bound) else None,
            "met": self.met,
            **self.figures,
        }
        if self.broken:
            line["broken"] = self.broken
        if self.cases:
            line["cases"] = {name: case.as_json() for name, case in self.cases.items()}
        return line


def compare(question: str, bound: float, ours: Timing, floor: Timing, **figures: Number) -> Row:
    """Make the usual row: the fastest repeat of ours over the fastest of the floor."""
    return Row(
        question=question,
        bound=bound,
        ns=ours.ns,
        floor_ns=floor.ns,
        ns_median=ours.median_ns,
        floor_median_ns=floor.median_ns,
        ratio=ours.ns / floor.ns,
        figures=figures,
    )


def worst_of(question: str, cases: Mapping[str, Row]) -> Row:
    """Join the parts of a row: it is as good as the part that comes nearest to its bound, or lies furthest above."""
    worst = max(cases.values(), key=lambda case: case.ratio / case.bound)
    return Row(
        question=question,
        bound=worst.bound,
        ns=worst.ns,
        floor_ns=worst.floor_ns,
        ns_median=worst.ns_median,
        floor_median_ns=worst.floor_median_ns,
        ratio=worst.ratio,
        cases=dict(cases),
        broken="; ".join(filter(None, (case.broken for case in cases.values()))),
    )
