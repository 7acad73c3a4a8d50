"""The cost of allocations that the pool can serve at once, next to making any Python object at all."""

import math
import random
import sys
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from asyncmem import AsyncMemoryPool, BucketPool
from asyncmem.cli.bench.timing import (
    QUICK,
    Effort,
    Row,
    Side,
    compare,
    random_plan,
    time_sides,
    unrolled,
    worst_of,
)
from asyncmem.core import Heap
from asyncmem.devices import Simulated

MIB: Final = 1 << 20


async def trivial() -> None:
    """Do nothing, at the cost of a coroutine."""


async def _timed(effort: Effort, bound: float, ours: str, floor: str, **names: object) -> Row:
    return compare(bound, *await time_sides([unrolled(ours, names), unrolled(floor, names)], effort))


# -- hit, await_hit, batch, buckets ------------------------------------------------------------------------------------

HIT_BOUND: Final = 1.6
# From 3.12 on, awaiting anything but a coroutine hands its value over in a StopIteration.
AWAIT_BOUND: Final = 1.0 if sys.version_info < (3, 12) else 1.5
BATCH_BOUND: Final = 1.2
BUCKET_BOUND: Final = 4.0
BATCH: Final = 100


async def hit(effort: Effort) -> Row:
    """Time `pool.allocate(4096)` and drop against `object()` and drop."""
    async with AsyncMemoryPool("host", limit="64 MiB") as pool:
        return await _timed(effort, HIT_BOUND, "pool.allocate(4096)", "object()", pool=pool, object=object)


async def await_hit(effort: Effort) -> Row:
    """Time an awaited hit against awaiting a trivial coroutine.

    A task yields to the loop once every thousand hits; that iteration is in the figure.
    """
    async with AsyncMemoryPool("host", limit="64 MiB") as pool:
        ours, floor = "await pool.allocate_async(4096)", "await trivial()"
        return await _timed(effort, AWAIT_BOUND, ours, floor, pool=pool, trivial=trivial)


async def buckets(effort: Effort) -> Row:
    """Time `BucketPool.try_get(1 MiB)` and `return_buffer` against `object()` and drop."""
    kept: BucketPool[bytearray] = BucketPool()
    kept.return_buffer(bytearray(MIB), MIB)
    ours = "buffers.return_buffer(buffers.try_get(1048576), 1048576)"
    return await _timed(effort, BUCKET_BOUND, ours, "object()", buffers=kept, object=object)


async def batch(effort: Effort) -> Row:
    """Time batches of 100, equal sizes and random ones, per buffer, against as many objects made one by one."""
    draw = random.Random(1)  # noqa: S311 - the same sizes every time are what is wanted
    mixed = [round(1024 * 1024 ** draw.random()) for _ in range(BATCH)]
    return worst_of({"equal": await _batch([4096] * BATCH, effort), "mixed": await _batch(mixed, effort)})


async def _batch(sizes: list[int], effort: Effort) -> Row:
    async with AsyncMemoryPool("host", limit="64 MiB") as pool:
        statement = "for buffer in await pool.allocate_batch(sizes): pass\ndel buffer"
        ours = unrolled(statement, {"pool": pool, "sizes": sizes}, times=1, operations=BATCH)
        floor = unrolled("object()", {"object": object}, times=BATCH)
        return compare(BATCH_BOUND, *await time_sides([ours, floor], effort), buffers=BATCH)


# -- churn: random sizes, which no cache serves; blocks are split and merged all the time ------------------------------

CHURN_BOUND: Final = 5.0
LIVE: Final = 1000
CHURN_SIZES: Final = (512, 16 << 20)
STEPS: Final = 5000


async def churn(effort: Effort) -> Row:
    """Time the replacement of a random one of 1000 live buffers; the loop over the plan is in both sides."""
    plan = random_plan(STEPS, LIVE, *CHURN_SIZES)
    async with AsyncMemoryPool("host", limit="8 GiB") as pool:
        live: list[object] = [pool.allocate(size) for _, size in random_plan(LIVE, LIVE, *CHURN_SIZES)]
        names = {"pool": pool, "object": object, "plan": plan, "live": live}
        sides = [
            _over_plan("live[slot] = pool.allocate(size)", names),
            _over_plan("live[slot] = object()", names | {"live": [object()] * LIVE}),
            _over_plan("pass", names),
        ]
        ours, floor, bare = await time_sides(sides, effort)
        live.clear()
    return compare(CHURN_BOUND, ours, floor, loop_ns=round(bare.ns, 2))


def _over_plan(step: str, names: Mapping[str, object]) -> Side:
    return unrolled(f"for slot, size in plan: {step}", names, times=1, operations=STEPS)


# -- large: blocks of up to a gibibyte, each of another size -----------------------------------------------------------

LARGE_BOUND: Final = 3.0
FIXED_BOUND: Final = 1.2
LARGEST: Final = 1 << 30
FIXED: Final = 768 << 20
FEW: Final = 4

ONE_LIVE: Final = "for size in plan: pool.allocate(size)"
FEW_LIVE: Final = """
for a, b, c, d in plan:
    a = pool.allocate(a)
    b = pool.allocate(b)
    c = pool.allocate(c)
    d = pool.allocate(d)
    del d, c, b, a
""".strip()


async def large(effort: Effort) -> Row:
    """Time one size, random sizes, and random sizes with four live at once, freed newest first, against 1 MiB."""
    sizes = [size for _, size in random_plan(STEPS, 1, MIB, LARGEST)]
    small = [MIB] * STEPS
    return worst_of({
        "fixed": await _large(effort, FIXED_BOUND, ONE_LIVE, [FIXED] * STEPS, small),
        "random": await _large(effort, LARGE_BOUND, ONE_LIVE, sizes, small),
        "random few": await _large(effort, LARGE_BOUND, FEW_LIVE, _by_fours(sizes), _by_fours(small)),
    })  # fmt: skip


async def _large(effort: Effort, bound: float, loop: str, plan: Sequence[object], hits: Sequence[object]) -> Row:
    limit = "8 GiB"
    async with AsyncMemoryPool("simulated", limit=limit) as pool, AsyncMemoryPool("simulated", limit=limit) as floor:
        # One segment for the most that is live at once, so that what is timed never grows.
        pool.allocate(FEW * LARGEST).free()
        floor.allocate(FEW * LARGEST).free()
        sides = [
            unrolled(loop, {"pool": one, "plan": sizes}, times=1, operations=STEPS)
            for one, sizes in ((pool, plan), (floor, hits))
        ]
        return compare(bound, *await time_sides(sides, effort))


def _by_fours(sizes: Sequence[int]) -> list[tuple[int, ...]]:
    return list(zip(*[iter(sizes)] * FEW, strict=True))


# -- scale: a million live blocks --------------------------------------------------------------------------------------

SCALE_BOUND: Final = 2.0
SCALE_FEW: Final = 1_000
SCALE_MANY: Final = 1_000_000
SCALE_SIZES: Final = (512, 256 << 10)
SCALE_STEPS: Final = 20_000
PLANS: Final = 50
CAPACITY: Final = 1 << 40
SEGMENT: Final = 1 << 44
MOST_NODES: Final = 64
"""Placement looks at no more than 32 candidates in each of two size classes, however many blocks there are."""


async def scale(effort: Effort) -> Row:
    """Compare the growth of the cost from 1,000 to 1,000,000 live blocks with the growth of the same loop's objects.

    Any loop over a million objects is slower than the same over a thousand, because neither objects nor list stay in
    the processor's caches. The nodes that the core looks at are counted in each.
    """
    # A quick run has as many: with fewer, caches of the processor still hold the floor and not the blocks.
    many = SCALE_MANY if effort.share >= QUICK.share else 10 * SCALE_FEW
    async with _simulated() as small, _simulated() as big:
        sides = [_scaled(small, SCALE_FEW), _scaled(big, many), _scaled(None, SCALE_FEW), _scaled(None, many)]
        few, lots, floor_few, floor_many = await time_sides(sides, effort)
        sides.clear()
    growth, floor_growth = lots.ns / few.ns, floor_many.ns / floor_few.ns
    touched_few, touched_many = nodes_touched(SCALE_FEW), nodes_touched(many)
    row = compare(
        SCALE_BOUND,
        lots,
        floor_many,
        broken="" if touched_many <= MOST_NODES else f"an operation looked at {touched_many} nodes",
        live=many,
        growth=round(growth, 2),
        floor_growth=round(floor_growth, 2),
        ns_few=round(few.ns, 2),
        floor_ns_few=round(floor_few.ns, 2),
        nodes_few=touched_few,
        nodes_many=touched_many,
    )
    return replace(row, ratio=growth / floor_growth)


def _simulated() -> AsyncMemoryPool:
    # The simulated device has no memory behind it, so that a hundred gigabytes of blocks fit on any machine.
    return AsyncMemoryPool(Simulated(capacity=CAPACITY), limit=CAPACITY)


def _scaled(pool: AsyncMemoryPool | None, live: int) -> Side:
    make = "object()"
    names: dict[str, object] = {"object": object, "pool": pool, "plans": endless_plans(live)}
    if pool is None:
        names["held"] = [object() for _ in range(live)]
    else:
        make = "pool.allocate(size)"
        names["held"] = [pool.allocate(size) for _, size in random_plan(live, live, *SCALE_SIZES)]
    statement = f"for slot, size in next(plans): held[slot] = {make}"
    return unrolled(statement, names, times=1, operations=SCALE_STEPS)


def endless_plans(live: int) -> Iterator[Iterator[tuple[int, int]]]:
    """Yield plan after plan, each with other victims: those of one alone would soon be in the processor's caches."""
    draw = np.random.default_rng(0)
    slots = [array("q", draw.integers(0, live, SCALE_STEPS).tobytes()) for _ in range(PLANS)]
    low, high = map(math.log, SCALE_SIZES)
    logarithms = (draw.uniform(low, high, SCALE_STEPS) for _ in range(PLANS))
    sizes = [array("q", np.exp(one).astype(np.int64).tobytes()) for one in logarithms]
    while True:
        yield from map(zip, slots, sizes)


def nodes_touched(live: int) -> int:
    """Run the same program on a bare heap and return the most nodes that one of its placements looked at."""
    heap = Heap()
    heap.add_segment(SEGMENT, CAPACITY, 1, 0)
    heap.add_segment(SEGMENT + CAPACITY, CAPACITY, 0, 0)
    held = [heap.take(size, 0) for _, size in random_plan(live, live, *SCALE_SIZES)]
    most = 0
    for slot, size in random_plan(SCALE_STEPS, live, *SCALE_SIZES):
        heap.free(held[slot])
        held[slot] = heap.take(size, 0)
        most = max(most, heap.touched())
    return most
