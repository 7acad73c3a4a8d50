"""The rows of a device about one allocation after another: hits, random sizes, batches, two streams, recordings."""

import random
import time
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Final, TypeVar

from asyncmem import AsyncMemoryPool
from asyncmem.cli.bench.allocations import CHURN_SIZES, LIVE, STEPS, trivial
from asyncmem.cli.bench.timing import (
    Effort,
    Side,
    Timing,
    collector_off,
    random_plan,
    summary,
    time_sides,
    unrolled,
)
from asyncmem.replay import Trace, read
from benchmarks.allocators import FLOOR, Allocator, AsyncmemPool, Calls, Crossing, Plan
from benchmarks.suite import Measured, Task, timed

Result = TypeVar("Result")

MIB: Final = 1 << 20
GIB: Final = 1 << 30


# -- loops over one allocator's calls, the same over `object()`, and over asyncmem's beside it -------------------------


def time_size(
    row: str, peer: Allocator, effort: Effort, size: int, *, case: str = "", against: int | None = None
) -> Measured:
    """Time one size, allocated and given back at once; with another, both in turn, as `time_plan` does."""
    with opened(peer) as calls:
        runs = [(one, size) for one in calls] + ([] if against is None else [(calls[0], against)])
        timings = plainly(time_sides([unrolled(one.once(str(nbytes)), one.names) for one, nbytes in runs], effort))
    return _compared(row, peer, timings, len(calls), case)


def time_plan(
    row: str, peer: Allocator, effort: Effort, plan: Plan, *, case: str = "", against: Plan | None = None
) -> Measured:
    """Time a plan in which every step replaces the block of a slot: give back, then allocate; per step.

    The plan has to end with what it begins with, as `circular` makes it. With another plan to compare with, the peer
    follows both in turn, that one by an allocator of its own, and the figure `to_other` is their ratio.
    """
    with opened(peer) as calls, ExitStack() as stack:
        runs = [(one, plan) for one in calls]
        if against is not None:
            runs.append((stack.enter_context(peer.opened()), against))
        held = [fill(one, steps) for one, steps in runs]
        try:
            sides = [
                _over_plan(one, one.over_plan(), steps, live, len(steps))
                for (one, steps), live in zip(runs, held, strict=True)
            ]
            timings = plainly(time_sides(sides, effort))
        finally:
            for (one, steps), live in zip(runs, held, strict=True):
                empty(one, steps, live)
    return _compared(row, peer, timings, len(calls), case)


def time_program(row: str, peer: Allocator, effort: Effort, plan: Plan, *, limit: int | None = None) -> Measured:
    """Time a plan whose steps either allocate or give back, per allocation; it starts and ends with nothing."""
    count, slots = sum(size > 0 for _, size, _ in plan), 1 + max(slot for slot, _, _ in plan)
    with opened(peer, limit) as calls:
        sides = [_over_plan(one, one.over_program(), plan, [None] * slots, count) for one in calls]
        timings = plainly(time_sides(sides, effort))
    return timed(row, peer, *timings)


def _over_plan(calls: Calls, statement: str, plan: Plan, live: list[object], operations: int) -> Side:
    return unrolled(statement, {**calls.names, "plan": plan, "live": live}, times=1, operations=operations)


@contextmanager
def opened(peer: Allocator, limit: int | None = None) -> Iterator[list[Calls]]:
    """Return the calls of an allocator, of the floor, and of asyncmem if it is measured beside that allocator.

    Under a limit there is no asyncmem beside it: the limit of some peers is one on the whole process.
    """
    with ExitStack() as stack:
        calls = [stack.enter_context(peer.opened(limit)), FLOOR]
        if peer.beside is not None and limit is None:
            calls.append(stack.enter_context(peer.beside.opened()))
        yield calls


def _compared(row: str, peer: Allocator, timings: Sequence[Timing], sides: int, case: str) -> Measured:
    """Return the figure of the first sides; another one behind them is what the first is compared with."""
    figure = timed(row, peer, *timings[:sides], case=case)
    others = timings[sides:]
    return replace(figure, figures={"to_other": timings[0].ns / others[0].ns}) if others else figure


def circular(drawn: Sequence[tuple[int, int]]) -> Plan:
    """Add to each (slot, size) the size that the slot has had, the first of a slot following on its last."""
    last = dict(drawn)
    plan = []
    for slot, size in drawn:
        plan.append((slot, size, last[slot]))
        last[slot] = size
    return plan


def fill(calls: Calls, plan: Plan) -> list[object]:
    """Allocate what a circular plan begins with."""
    take, before = calls.take(), {slot: size for slot, size, _ in plan}
    return [take(before[slot]) if slot in before else None for slot in range(1 + max(before))]


def empty(calls: Calls, plan: Plan, held: list[object]) -> None:
    """Give back what a circular plan ends with."""
    before = {slot: size for slot, size, _ in plan}
    kept = [block for slot, block in enumerate(held) if slot in before]
    sizes = [before[slot] for slot in range(len(held)) if slot in before]
    held.clear()
    calls.give(kept, sizes)


def plainly(main: Coroutine[object, object, Result]) -> Result:
    """Run a coroutine that never waits, without any event loop."""
    try:
        main.send(None)
    except StopIteration as end:
        result: Result = end.value
        return result
    main.close()
    raise RuntimeError("a measurement outside of an event loop has waited")


# -- the rows ----------------------------------------------------------------------------------------------------------


def hit(peer: Allocator, task: Task) -> Iterator[Measured]:
    """Time to allocate 1 MiB and give it back, warm, over and over."""
    yield time_size("hit", peer, task.effort, MIB)


def churn(peer: Allocator, task: Task) -> Iterator[Measured]:
    """Time the replacement of a random one of 1000 live blocks; the loop over the plan is in both sides."""
    yield time_plan("churn", peer, task.effort, circular(random_plan(STEPS, LIVE, *CHURN_SIZES)))


def await_hit(peer: Allocator, task: Task) -> Iterator[Measured]:
    """Time an awaited hit of 1 MiB; the floor is an awaited trivial coroutine."""
    yield task.effort.run(_await_hit(peer, task.effort))


async def _await_hit(peer: Allocator, effort: Effort) -> Measured:
    with peer.opened() as calls:
        ours = unrolled(f"await pool.allocate_async({MIB})", calls.names)
        floor = unrolled("await trivial()", {"trivial": trivial})
        return timed("await_hit", peer, *await time_sides([ours, floor], effort))


# -- batch: a hundred blocks that are needed together ------------------------------------------------------------------

BATCH: Final = 100
ALLOCATE_BATCH: Final = "for block in await pool.allocate_batch(sizes): pass\ndel block"


def batch(peer: Allocator, task: Task) -> Iterator[Measured]:
    """Time whole batches, per block; an allocator without a call for them makes a hundred single calls."""
    mixed = [size for _, size in random_plan(BATCH, 1, 512, MIB)]
    random.Random(0).shuffle(mixed)  # noqa: S311 - the same order every time is what is wanted
    for case, sizes in {"equal": [64 << 10] * BATCH, "mixed": mixed}.items():
        yield task.effort.run(_batch(peer, task.effort, case, sizes))


async def _batch(peer: Allocator, effort: Effort, case: str, sizes: list[int]) -> Measured:
    with opened(peer) as calls:
        theirs, floor, *beside = [one.hundred() for one in calls]
        ours = ALLOCATE_BATCH if isinstance(peer, AsyncmemPool) else theirs
        statements = [ours, floor, *(ALLOCATE_BATCH for _ in beside)]
        sides = [
            unrolled(statement, {**one.names, "sizes": sizes}, times=1, operations=BATCH)
            for one, statement in zip(calls, statements, strict=True)
        ]
        return timed("batch", peer, *await time_sides(sides, effort), case=case)


# -- large: blocks of 1 MiB to 1 GiB -----------------------------------------------------------------------------------

LARGE: Final = {"16 MiB": 16 * MIB, "1 GiB": GIB}
LARGE_STEPS: Final = 1000
LARGE_LIVE: Final = (1, 8)


def large(peer: Allocator, task: Task) -> Iterator[Measured]:
    """Time fixed sizes as `hit` does, and random ones in a loop over a plan.

    asyncmem's pool does the same with 1 MiB in turn: a second later the processor may be at another pace.
    """
    ours = isinstance(peer, AsyncmemPool)
    for case, size in LARGE.items():
        yield time_size("large", peer, task.effort, size, case=case, against=MIB if ours else None)
    one_size = circular([(0, MIB)] * LARGE_STEPS) if ours else None
    for live in LARGE_LIVE:
        plan = circular(random_plan(LARGE_STEPS, live, MIB, GIB))
        yield time_plan("large", peer, task.effort, plan, case=f"random, {live} live", against=one_size)


# -- cross_stream: a producer allocates on one stream, a consumer frees on another -------------------------------------

COUNTED_TURNS: Final = 1000


def cross_stream(peer: Allocator, task: Task) -> Iterator[Measured]:
    """Time to allocate 1 MiB on stream A, order B behind A and free on B, and count the driver calls in steady state.

    The consumer's stream is ordered behind the producer's, as it must be for the driver's allocator and for any use of
    the block. Both streams are idle but for what the allocators put there, so the times are the host's alone.
    """
    yield from _crossings(peer, task.effort)
    if isinstance(peer, AsyncmemPool):
        with peer.tuned(fence_every=1):
            yield from (replace(one, case="a fence each") for one in _crossings(peer, task.effort))


def _crossings(peer: Allocator, effort: Effort) -> Iterator[Measured]:
    opened = peer.crossing()
    if opened is None:
        return
    with ExitStack() as stack:
        crossings = [stack.enter_context(opened)]
        beside = None if peer.beside is None else peer.beside.crossing()
        if beside is not None:
            crossings.append(stack.enter_context(beside))
        yield plainly(_cross(peer, effort, crossings))


async def _cross(peer: Allocator, effort: Effort, crossings: list[Crossing]) -> Measured:
    theirs, *beside = [unrolled(one.statement.format(size=MIB), one.names) for one in crossings]
    floor = unrolled(FLOOR.once(str(MIB)), FLOOR.names)
    floor_timing, *timings = await time_sides([floor, theirs, *beside], effort)
    counts = crossings[0].counts
    before = counts()
    await theirs.run(COUNTED_TURNS)
    added = {name: number - before[name] for name, number in counts().items()}
    found = timed("cross_stream", peer, timings[0], floor_timing, *timings[1:])
    per_block = {f"{name}_per_block": round(one / theirs.operations / COUNTED_TURNS, 3) for name, one in added.items()}
    broken = f"{added['waits']} requests had to wait" if added.get("waits") else ""
    return replace(found, figures=per_block, broken=broken)


# -- replay: a recorded program's allocations and frees ----------------------------------------------------------------

RUNS: Final = 3
WARM_UP: Final = 1
REST_SECONDS: Final = 0.2
"""How long a card is left alone before each run: it still clears what was given back, and the next request waits."""


def replay(peer: Allocator, task: Task) -> Iterator[Measured]:
    """Time each recording's steps, in turn with asyncmem's pool and the floor; its own also in another kind of memory.

    The program's own work is left out, and all its streams are one, so that each allocator does the same. Each run
    begins with an allocator that has no memory of the device; the time to get it is included.
    """
    for file in task.traces:
        trace, name = read(file), Path(file).stem
        yield _replay(peer, task, trace, name)
        if isinstance(peer, AsyncmemPool) and peer.device.kind != "host":
            other = "stream_ordered" if peer.device.prefers_pages else "paged"
            with peer.tuned(segments=other):
                yield _replay(peer, task, trace, f"{name}, {other}")


def plan_of(trace: Trace) -> Plan:
    """Return a recording as a plan whose steps either allocate into an empty slot or empty one; nothing for 0 bytes."""
    steps = trace.steps()
    sizes: dict[int, int] = {}
    plan = []
    for slot, nbytes in zip(steps.slot.tolist(), steps.nbytes.tolist(), strict=True):
        if nbytes > 0:
            sizes[slot] = nbytes
            plan.append((slot, nbytes, 0))
        elif slot in sizes:
            plan.append((slot, 0, sizes.pop(slot)))
    return plan + [(slot, 0, nbytes) for slot, nbytes in sizes.items()]


def _replay(peer: Allocator, task: Task, trace: Trace, case: str) -> Measured:
    plan, slots = plan_of(trace), trace.allocations
    peers = [peer] if peer.beside is None else [peer, peer.beside]
    times: list[list[float]] = [[] for _ in (*peers, FLOOR)]
    reserved = 0
    with collector_off():
        for run in range(WARM_UP + max(2, round(RUNS * task.effort.share))):
            if run == WARM_UP:
                times = [[] for _ in times]
            for one, taken in zip(peers, times, strict=False):
                time.sleep(REST_SECONDS * task.effort.share if task.device.startswith("cuda") else 0)
                with one.opened() as calls:
                    taken.append(_run_plan(calls, plan, slots))
                    if one is peer:
                        reserved = _reserved(calls)
            times[-1].append(_run_plan(FLOOR, plan, slots))
    theirs, *beside, floor = map(summary, times)
    figures = {"reserved_over_requested": round(reserved / trace.peak_requested, 4)} if reserved else {}
    return replace(timed("replay", peer, theirs, floor, *beside, case=case), figures=figures)


def _run_plan(calls: Calls, plan: Plan, slots: int) -> float:
    side = _over_plan(calls, calls.over_program(), plan, [None] * slots, max(1, len(plan)))
    return plainly(side.run(1)) / side.operations


def _reserved(calls: Calls) -> int:
    pool = calls.names.get("pool")
    return pool.stats().peak_reserved if isinstance(pool, AsyncMemoryPool) else 0
