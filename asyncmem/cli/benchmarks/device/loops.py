"""Loops over one allocator's calls, and the same loops over `object()`."""

from collections.abc import Iterator, Mapping

from asyncmem.cli.benchmarks.device.measured import Figure, Measured, timed
from asyncmem.cli.benchmarks.measure import UNROLL, Effort, Side, plainly, time_apart, unrolled
from asyncmem.cli.benchmarks.peers.peer import Peer
from asyncmem.cli.benchmarks.peers.way import FLOOR, Plan, Way


def hit(row: str, peer: Peer, effort: Effort, size: int, *, case: str = "") -> Measured:
    """Time one size, allocated and given back at once."""
    with peer.opened() as way:
        sides = [(unrolled(one.once(str(size)), one.names), UNROLL) for one in (way, FLOOR)]
        ours, floor = plainly(time_apart(sides, effort))
    return timed(row, peer.name, ours, floor, case=case, unlike=peer.unlike.get(row))


def over_plan(
    row: str, peer: Peer, effort: Effort, plan: Plan, *, case: str = "", limit: int | None = None, **figures: Figure
) -> Measured:
    """Time a plan in which every step replaces the block of a slot: give back, then allocate; per step.

    The plan has to end with what it begins with, as `circular` makes it.
    """
    with peer.opened(limit) as way:
        held = fill(way, plan)
        try:
            sides = [_following(way, plan, held), _following(FLOOR, plan, [object()] * len(held))]
            ours, floor = plainly(time_apart(sides, effort))
        finally:
            empty(way, plan, held)
    return timed(row, peer.name, ours, floor, case=case, unlike=peer.unlike.get(row), **figures)


def over_program(
    row: str, peer: Peer, effort: Effort, plan: Plan, *, case: str = "", limit: int | None = None, **figures: Figure
) -> Measured:
    """Time a plan whose steps either allocate or give back, per allocation; it starts and ends with nothing."""
    slots = 1 + max(slot for slot, _, _ in plan)
    count = sum(size > 0 for _, size, _ in plan)
    with peer.opened(limit) as way:
        live: list[object] = [None] * slots
        sides: list[Side] = [
            (unrolled(one.obey(), {**one.names, "plan": plan, "live": live}, times=1), count) for one in (way, FLOOR)
        ]
        try:
            ours, floor = plainly(time_apart(sides, effort))
        finally:
            live.clear()
    return timed(row, peer.name, ours, floor, case=case, unlike=peer.unlike.get(row), **figures)


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


def _following(way: Way, plan: Plan, held: list[object]) -> Side:
    return unrolled(way.follow(), {**way.names, "plan": plan, "live": held}, times=1), len(plan)
