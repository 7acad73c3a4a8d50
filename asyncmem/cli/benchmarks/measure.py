"""The method: unrolled statements in one compiled loop, both sides in turn, minimum and median of the repeats.

Both sides run in the same process, in the same kind of frame (a coroutine, so that a statement may await), unrolled
alike, with the garbage collector off. Loop overhead is in both and is subtracted from neither, which makes a ratio look
slightly better than the bare calls would: some 3 ns of each side.
"""

import asyncio
import gc
import itertools
import statistics
import textwrap
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, TypeAlias, TypeVar

from asyncmem.cli.benchmarks.result import Timing

Loop: TypeAlias = Callable[[int], Awaitable[int]]
"""Runs the unrolled statements so many times and answers the nanoseconds it took."""

Result = TypeVar("Result")

UNROLL: Final = 10


@dataclass(frozen=True, slots=True)
class Effort:
    """How long to measure."""

    repeats: int
    """How often each side is timed."""
    repeat_ns: int
    """How long one timing of the faster side should last at least."""
    share: float
    """How much of the full amount of work the rows do that do not repeat a statement."""
    loop_factory: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop
    """Makes the event loop that both sides run on."""

    def run(self, main: Coroutine[object, object, Result]) -> Result:
        """Run a coroutine on a fresh loop of that kind."""
        with asyncio.Runner(loop_factory=self.loop_factory) as runner:
            return runner.run(main)


Side: TypeAlias = tuple[Loop, int]
"""What is timed, and how many operations one turn of its loop makes."""

SETTLE_NS: Final = 20_000_000
"""How long a side of `time_apart` runs before it is timed: caches fill, and a pool's worker gets ahead of demand."""
PATIENCE_NS: Final = 2_000_000_000
"""How long one side of `time_apart` may take before its repeats are cut short."""
FEWEST_REPEATS: Final = 3

FULL: Final = Effort(repeats=21, repeat_ns=10_000_000, share=1.0)
QUICK: Final = Effort(repeats=5, repeat_ns=2_000_000, share=0.1)


def unrolled(statement: str, names: Mapping[str, object], *, times: int = UNROLL) -> Loop:
    """Compile a loop that runs `statement` `times` times a turn; `names` are its local variables."""
    body = textwrap.indent("\n".join([statement] * times), " " * 8)
    source = (
        f"async def loop(_turns, _clock, _repeat, {', '.join(names)}):\n"
        f"    _start = _clock()\n"
        f"    for _ in _repeat(None, _turns):\n{body}\n"
        f"    return _clock() - _start\n"
    )
    space: dict[str, Callable[..., Awaitable[int]]] = {}
    exec(compile(source, f"<benchmark: {statement}>", "exec"), space)  # noqa: S102 - how timeit does it too
    loop, given = space["loop"], tuple(names.values())
    return lambda turns: loop(turns, time.perf_counter_ns, itertools.repeat, *given)


async def interleave(sides: Sequence[Loop], effort: Effort, *, per_turn: int = UNROLL) -> list[Timing]:
    """Time each side in turn, as often as the effort says, and answer nanoseconds per single operation of each.

    Args:
        sides: What is compared.
        effort: How often and how long.
        per_turn: Operations in one turn of a side's loop.
    """
    samples: list[list[float]] = [[] for _ in sides]
    with collector_off():
        turns = await _calibrate(sides, effort)
        for repeat in range(effort.repeats):
            # Every other round runs backwards, so that no side always profits from what the one before it left behind.
            order = range(len(sides)) if repeat % 2 else reversed(range(len(sides)))
            for index in order:
                samples[index].append(await sides[index](turns) / (turns * per_turn))
    return [summary(one) for one in samples]


async def time_apart(sides: Sequence[Side], effort: Effort) -> list[Timing]:
    """Do as `interleave` does for sides whose speeds lie far apart: each makes as many turns as it needs by itself.

    A side that is slow even so gets fewer repeats, three at the least.
    """
    samples: list[list[float]] = [[] for _ in sides]
    spent = [0] * len(sides)
    with collector_off():
        turns = [await _calibrate([side], effort) for side, _ in sides]
        if effort.repeat_ns >= QUICK.repeat_ns:
            await _settle(sides, turns)
        for repeat in range(effort.repeats):
            order = range(len(sides)) if repeat % 2 else reversed(range(len(sides)))
            for index in order:
                if spent[index] > PATIENCE_NS and repeat >= FEWEST_REPEATS:
                    continue
                side, per_turn = sides[index]
                took = await side(turns[index])
                spent[index] += took
                samples[index].append(took / (turns[index] * per_turn))
    return [summary(one) for one in samples]


def plainly(main: Coroutine[object, object, Result]) -> Result:
    """Run a coroutine that never waits, without any event loop."""
    try:
        main.send(None)
    except StopIteration as end:
        result: Result = end.value
        return result
    main.close()
    raise RuntimeError("a measurement outside of an event loop has waited")


def summary(samples: Sequence[float]) -> Timing:
    """Take the minimum and the median."""
    return Timing(ns=min(samples), median_ns=statistics.median(samples))


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


async def _settle(sides: Sequence[Side], turns: Sequence[int]) -> None:
    for (side, _), count in zip(sides, turns, strict=True):
        spent = 0
        while spent < SETTLE_NS:
            spent += await side(count)


async def _calibrate(sides: Sequence[Loop], effort: Effort) -> int:
    """Find how many turns the faster side needs to last long enough. It warms both sides up, too."""
    turns = 1
    while min([await side(turns) for side in sides]) < effort.repeat_ns:
        turns *= 2
    return turns
