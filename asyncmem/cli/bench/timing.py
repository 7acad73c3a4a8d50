"""How a benchmark is timed, and its result.

Statements are unrolled in one compiled loop, the sides run in turn, and the minimum and the median of the repeats are
kept. All sides run in the same process, in the same kind of frame (a coroutine, so that a statement may await), with
the garbage collector off. Loop overhead is in every side and is subtracted from none, which makes a ratio look slightly
better than the bare calls would: some 3 ns of each side.
"""

import asyncio
import gc
import itertools
import math
import random
import statistics
import textwrap
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple, TypeAlias, TypeVar

Number: TypeAlias = float | int | str
Json: TypeAlias = Mapping[str, "Number | bool | Json | None"]
Loop: TypeAlias = Callable[[int], Coroutine[object, object, int]]
"""Runs so many turns and returns the nanoseconds they took."""
Result = TypeVar("Result")

TASKS: Final = (20, 200, 1_000, 5_000, 20_000)
UNROLL: Final = 10
SETTLE_NS: Final = 20_000_000
"""How long a side runs before it is timed: caches fill, and a pool's worker gets ahead of demand."""
PATIENCE_NS: Final = 2_000_000_000
"""How long one side may take before its repeats are cut short."""
FEWEST_REPEATS: Final = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """One side of a comparison over several repeats."""

    ns: float
    """The fastest repeat: what the work costs when nothing interferes."""
    median_ns: float
    """The middle one: what it costs on this machine, as busy as it is."""


@dataclass(frozen=True, slots=True)
class Effort:
    """How long to measure."""

    repeats: int
    """How often each side is timed."""
    repeat_ns: int
    """How long one timing should last at least."""
    share: float
    """How much of the full amount of work the rows do that do not repeat a statement."""
    uvloop: bool = False
    """Whether uvloop's event loop is used, and not asyncio's own."""
    tasks: Sequence[int] = TASKS
    """How many tasks `contention` has, one number after the other."""

    def run(self, main: Coroutine[object, object, Result]) -> Result:
        """Run a coroutine on a fresh loop of that kind."""
        with asyncio.Runner(loop_factory=self._new_loop) as runner:
            return runner.run(main)

    def _new_loop(self) -> asyncio.AbstractEventLoop:
        if not self.uvloop:
            return asyncio.SelectorEventLoop()
        import uvloop

        return uvloop.Loop()


FULL: Final = Effort(repeats=21, repeat_ns=10_000_000, share=1.0)
QUICK: Final = Effort(repeats=5, repeat_ns=2_000_000, share=0.1)


class Side(NamedTuple):
    """One side of a comparison."""

    run: Loop
    operations: int
    """How many one turn makes."""


def unrolled(statement: str, names: Mapping[str, object], *, times: int = UNROLL, operations: int = 0) -> Side:
    """Compile a loop that runs `statement` `times` times a turn.

    Args:
        statement: Python source.
        names: Its local variables.
        times: How often it stands in the loop.
        operations: What one turn counts for; `times` without it.
    """
    body = textwrap.indent("\n".join([statement] * times), " " * 8)
    source = (
        f"async def loop(_turns, _clock, _repeat, {', '.join(names)}):\n"
        f"    _start = _clock()\n"
        f"    for _ in _repeat(None, _turns):\n{body}\n"
        f"    return _clock() - _start\n"
    )
    space: dict[str, Callable[..., Coroutine[object, object, int]]] = {}
    exec(compile(source, f"<benchmark: {statement}>", "exec"), space)  # noqa: S102 - how timeit does it too
    loop, given = space["loop"], tuple(names.values())
    return Side(lambda turns: loop(turns, time.perf_counter_ns, itertools.repeat, *given), operations or times)


async def time_sides(sides: Sequence[Side], effort: Effort) -> list[Timing]:
    """Time each side in turn, as often as the effort says, and return nanoseconds per operation of each.

    Each makes as many turns as it needs to last long enough. One that is slow even so gets fewer repeats, three at the
    least.
    """
    samples: list[list[float]] = [[] for _ in sides]
    spent = [0] * len(sides)
    with collector_off():
        turns = [await _calibrate(side, effort) for side in sides]
        for repeat in range(effort.repeats):
            # Every other round runs backwards, so that no side always profits from what the one before it left behind.
            order = range(len(sides)) if repeat % 2 else reversed(range(len(sides)))
            for index in order:
                if spent[index] > PATIENCE_NS and repeat >= FEWEST_REPEATS:
                    continue
                took = await sides[index].run(turns[index])
                spent[index] += took
                samples[index].append(took / (turns[index] * sides[index].operations))
    return [summary(one) for one in samples]


async def _calibrate(side: Side, effort: Effort) -> int:
    """Find how many turns last long enough, and warm the side up."""
    turns = 1
    while await side.run(turns) < effort.repeat_ns:
        turns *= 2
    warm = 0
    while warm < SETTLE_NS and effort.repeat_ns >= QUICK.repeat_ns:
        warm += await side.run(turns)
    return turns


def summary(samples: Sequence[float]) -> Timing:
    """Return the minimum and the median."""
    return Timing(ns=min(samples), median_ns=statistics.median(samples))


def random_plan(steps: int, live: int, smallest: int, largest: int) -> list[tuple[int, int]]:
    """Draw (slot, size) pairs: slots evenly, sizes evenly over their logarithm, so each order of size is common."""
    draw = random.Random(0)  # noqa: S311 - the same numbers every time are what is wanted
    low, high = math.log(smallest), math.log(largest)
    return [(draw.randrange(live), int(math.exp(draw.uniform(low, high)))) for _ in range(steps)]


def percentile(samples: Sequence[int], share: float) -> int:
    """Return the smallest sample that at least `share` of them do not exceed."""
    return sorted(samples)[math.ceil(share * len(samples)) - 1]


@contextmanager
def collector_off() -> Iterator[None]:
    """Keep Python's garbage collector out of the measurement."""
    was_on = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """The result of one benchmark against its floor."""

    bound: float
    """The most that `ratio` may be; infinite if it has none."""
    ours: Timing
    floor: Timing
    ratio: float
    """What is compared with the bound: the fastest of ours over the fastest of the floor, unless a row says more."""
    figures: Mapping[str, Number] = field(default_factory=dict)
    """Further figures, each with its unit in its name."""
    cases: Mapping[str, "Row"] = field(default_factory=dict)
    """The row's parts, if it has several; the row itself then repeats the worst of them."""
    broken: str = ""
    """A promise besides the bound that did not hold, in words."""

    @property
    def met(self) -> bool:
        """Whether everything that the row promises held in this run."""
        return self.ratio <= self.bound and not self.broken

    def as_json(self) -> Json:
        """Return a mapping for JSON."""
        line: dict[str, Number | bool | Json | None] = {
            "ns": round(self.ours.ns, 2),
            "floor_ns": round(self.floor.ns, 2),
            "ratio": round(self.ratio, 3),
            "ns_median": round(self.ours.median_ns, 2),
            "floor_median_ns": round(self.floor.median_ns, 2),
            "bound": self.bound if math.isfinite(self.bound) else None,
            "met": self.met,
            **self.figures,
        }
        if self.broken:
            line["broken"] = self.broken
        if self.cases:
            line["cases"] = {name: case.as_json() for name, case in self.cases.items()}
        return line


def compare(bound: float, ours: Timing, floor: Timing, *, broken: str = "", **figures: Number) -> Row:
    """Return the usual row: the fastest repeat of ours over the fastest of the floor."""
    return Row(bound=bound, ours=ours, floor=floor, ratio=ours.ns / floor.ns, figures=figures, broken=broken)


def worst_of(cases: Mapping[str, Row]) -> Row:
    """Join the parts of a row. It repeats the part that comes nearest to its bound, or lies furthest above."""
    worst = max(cases.values(), key=lambda case: case.ratio / case.bound)
    broken = "; ".join(filter(None, (case.broken for case in cases.values())))
    return replace(worst, figures={}, cases=dict(cases), broken=broken)
