"""Does an allocation cost more with a million live blocks than with a thousand, beyond what memory caches make of it?

Any loop over a million objects is slower than the same over a thousand, because neither objects nor list stay in the
processor's caches. So the growth of our loop is compared with the growth of the same loop over `object()`.
"""

import math
from array import array
from collections.abc import Iterator
from typing import Final

import numpy as np

from asyncmem import AsyncMemoryPool
from asyncmem.cli.benchmarks.churn import random_plan
from asyncmem.cli.benchmarks.measure import QUICK, Effort, Loop, interleave, unrolled
from asyncmem.cli.benchmarks.result import Row
from asyncmem.core import Heap
from asyncmem.devices import Simulated

BOUND: Final = 2.0
QUESTION: Final = "random victims and sizes, growth from 1,000 to 1,000,000 live, against the growth over object()"
FEW: Final = 1_000
MANY: Final = 1_000_000
SMALLEST: Final = 512
LARGEST: Final = 256 << 10
STEPS: Final = 20_000
PLANS: Final = 50
CAPACITY: Final = 1 << 40
SEGMENT: Final = 1 << 44
MOST_NODES: Final = 64
"""Placement looks at no more than 32 candidates in each of two size classes, however many blocks there are."""


def measure(effort: Effort) -> Row:
    """Time both loops over few and over many live blocks, and count the nodes that the core looks at in each."""
    return effort.run(_measure(effort))


async def _measure(effort: Effort) -> Row:
    # A quick run has as many: with fewer, caches of the processor still hold the floor and not the blocks.
    many = MANY if effort.share >= QUICK.share else 10 * FEW
    async with _pool() as small, _pool() as large:
        sides = [_loop(small, FEW), _loop(large, many), _floor(FEW), _floor(many)]
        few, lots, floor_few, floor_many = await interleave(sides, effort, per_turn=STEPS)
        sides.clear()
    growth, floor_growth = lots.ns / few.ns, floor_many.ns / floor_few.ns
    touched_few, touched_many = nodes_touched(FEW), nodes_touched(many)
    return Row(
        question=QUESTION,
        bound=BOUND,
        ns=lots.ns,
        floor_ns=floor_many.ns,
        ns_median=lots.median_ns,
        floor_median_ns=floor_many.median_ns,
        ratio=growth / floor_growth,
        figures={
            "live": many,
            "growth": round(growth, 2),
            "floor_growth": round(floor_growth, 2),
            "ns_few": round(few.ns, 2),
            "floor_ns_few": round(floor_few.ns, 2),
            "nodes_few": touched_few,
            "nodes_many": touched_many,
        },
        broken="" if touched_many <= MOST_NODES else f"an operation looked at {touched_many} nodes",
    )


def _pool() -> AsyncMemoryPool:
    # The simulated device has no memory behind it, so that a hundred gigabytes of blocks fit on any machine.
    return AsyncMemoryPool(Simulated(capacity=CAPACITY), limit=CAPACITY)


def _loop(pool: AsyncMemoryPool, live: int) -> Loop:
    held = [pool.allocate(size) for _, size in random_plan(live, live, SMALLEST, LARGEST)]
    names = {"pool": pool, "held": held, "plans": endless_plans(live)}
    return unrolled("for slot, size in next(plans): held[slot] = pool.allocate(size)", names, times=1)


def _floor(live: int) -> Loop:
    names = {"object": object, "held": [object() for _ in range(live)], "plans": endless_plans(live)}
    return unrolled("for slot, size in next(plans): held[slot] = object()", names, times=1)


def endless_plans(live: int) -> Iterator[Iterator[tuple[int, int]]]:
    """Give plan after plan, each with other victims: those of one alone would soon be in the processor's caches."""
    draw = np.random.default_rng(0)
    slots = [array("q", draw.integers(0, live, STEPS).tobytes()) for _ in range(PLANS)]
    logarithms = (draw.uniform(math.log(SMALLEST), math.log(LARGEST), STEPS) for _ in range(PLANS))
    sizes = [array("q", np.exp(one).astype(np.int64).tobytes()) for one in logarithms]
    while True:
        yield from map(zip, slots, sizes)


def nodes_touched(live: int) -> int:
    """Run the same program on a bare heap and answer the most nodes that one of its placements looked at."""
    heap = Heap()
    heap.add_segment(SEGMENT, CAPACITY, 1, 0)
    heap.add_segment(SEGMENT + CAPACITY, CAPACITY, 0, 0)
    held = [heap.take(size, 0) for _, size in random_plan(live, live, SMALLEST, LARGEST)]
    most = 0
    for slot, size in random_plan(STEPS, live, SMALLEST, LARGEST):
        heap.free(held[slot])
        held[slot] = heap.take(size, 0)
        most = max(most, heap.touched())
    return most
