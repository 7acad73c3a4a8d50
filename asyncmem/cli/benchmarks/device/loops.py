"""Loops over one allocator's calls, the same over `object()`, and over asyncmem's where it is measured beside."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace

from asyncmem.cli.benchmarks.device.measured import Measured, timed
from asyncmem.cli.benchmarks.measure import UNROLL, Effort, plainly, time_apart, unrolled
from asyncmem.cli.benchmarks.peers.peer import Peer
from asyncmem.cli.benchmarks.peers.way import FLOOR, Plan, Way
from asyncmem.cli.benchmarks.result import Timing


def hit(row: str, peer: Peer, effort: Effort, size: int, *, case: str = "", against: int | None = None) -> Measured:
    """Time one size, allocated and given back at once; with another, both in turn, as `over_plan` does."""
    with opened(peer) as ways:
        runs = [(way, size) for way in ways] + ([] if against is None else [(ways[0], against)])
        sides = [(unrolled(way.once(str(nbytes)), way.names), UNROLL) for way, nbytes in runs]
        timings = plainly(time_apart(sides, effort))
    figure = _figure(row, peer, timings[: len(ways)], case)
    return figure if against is None else _held_against(figure, timings)


def over_plan(
    row: str, peer: Peer, effort: Effort, plan: Plan, *, case: str = "", against: Plan | None = None
) -> Measured:
    """Time a plan in which every step replaces the block of a slot: give back, then allocate; per step.

    The plan has to end with what it begins with, as `circular` makes it. With another plan to hold it against, the peer
    follows both in turn, that one by an allocator of its own, and the figure `to_other` tells how they compare.
    """
    with opened(peer) as ways, ExitStack() as stack:
        runs = [(way, plan) for way in ways]
        if against is not None:
            runs.append((stack.enter_context(peer.opened()), against))
        held = [fill(way, steps) for way, steps in runs]
        try:
            sides = [
                (unrolled(way.follow(), {**way.names, "plan": steps, "live": live}, times=1), len(steps))
                for (way, steps), live in zip(runs, held, strict=True)
            ]
            timings = plainly(time_apart(sides, effort))
        finally:
            for (way, steps), live in zip(runs, held, strict=True):
                empty(way, steps, live)
    figure = _figure(row, peer, timings[: len(ways)], case)
    return figure if against is None else _held_against(figure, timings)


def over_program(row: str, peer: Peer, effort: Effort, plan: Plan, *, limit: int | None = None) -> Measured:
    """Time a plan whose steps either allocate or give back, per allocation; it starts and ends with nothing."""
    count = sum(size > 0 for _, size, _ in plan)
    with opened(peer, limit) as ways:
        held: list[list[object]] = [[None] * (1 + max(slot for slot, _, _ in plan)) for _ in ways]
        sides = [
            (unrolled(way.obey(), {**way.names, "plan": plan, "live": live}, times=1), count)
            for way, live in zip(ways, held, strict=True)
        ]
        try:
            timings = plainly(time_apart(sides, effort))
        finally:
            for live in held:
                live.clear()
    return _figure(row, peer, timings)


@contextmanager
def opened(peer: Peer, limit: int | None = None) -> Iterator[list[Way]]:
    """Answer the ways of a peer, of the floor, and of asyncmem where it is measured beside that peer.

    Under a limit there is no asyncmem beside it: the limit of some peers is one on the whole process.
    """
    with ExitStack() as stack:
        ways = [stack.enter_context(peer.opened(limit)), FLOOR]
        if peer.beside is not None and limit is None:
            ways.append(stack.enter_context(peer.beside.opened()))
        yield ways


def _held_against(figure: Measured, timings: Sequence[Timing]) -> Measured:
    return replace(figure, figures={"to_other": timings[0].ns / timings[-1].ns})


def _figure(row: str, peer: Peer, timings: Sequence[Timing], case: str = "") -> Measured:
    theirs, floor, *beside = timings
    unlike = peer.unlike.get(row)
    return timed(row, peer.name, theirs, floor, case=case, beside=beside[0] if beside else None, unlike=unlike)


def circular(steps: Iterator[tuple[int, int]]) -> Plan:
    """Add to each (slot, size) the size that the slot has had, the first of a slot following on its last."""
    drawn = list(steps)
    last = dict(drawn)
    plan = []
    for slot, size in drawn:
        plan.append((slot, size, last[slot]))
        last[slot] = size
    return plan


def sizes_before(plan: Plan) -> Mapping[int, int]:
    """Answer what a circular plan expects in each slot when it begins."""
    return {slot: size for slot, size, _ in plan}


def fill(way: Way, plan: Plan) -> list[object]:
    """Allocate what a circular plan begins with."""
    take, before = way.take(), sizes_before(plan)
    return [take(before[slot]) if slot in before else None for slot in range(1 + max(before))]


def empty(way: Way, plan: Plan, held: list[object]) -> None:
    """Give back what a circular plan ends with."""
    before = sizes_before(plan)
    kept = [block for slot, block in enumerate(held) if slot in before]
    sizes = [before[slot] for slot in range(len(held)) if slot in before]
    held.clear()
    way.give()(kept, sizes)
