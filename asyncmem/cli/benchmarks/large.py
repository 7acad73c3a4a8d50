"""Do blocks of up to a gibibyte, each of another size, cost what a small one costs that was asked for just before?"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from asyncmem import AsyncMemoryPool
from asyncmem.cli.benchmarks.churn import random_plan
from asyncmem.cli.benchmarks.measure import Effort, interleave, unrolled
from asyncmem.cli.benchmarks.result import Row, compare, worst_of

BOUND: Final = 3.0
FIXED_BOUND: Final = 1.2
QUESTION: Final = "1 MiB to 1 GiB, allocate and drop, against hits of 1 MiB in the same loop"
DEVICE: Final = "simulated"
LIMIT: Final = "8 GiB"
SMALLEST: Final = 1 << 20
LARGEST: Final = 1 << 30
FIXED: Final = 768 << 20
FEW: Final = 4
STEPS: Final = 5000

ONE_LIVE: Final = "for size in plan: pool.allocate(size)"
FEW_LIVE: Final = """
for a, b, c, d in plan:
    a = pool.allocate(a)
    b = pool.allocate(b)
    c = pool.allocate(c)
    d = pool.allocate(d)
    del d, c, b, a
""".strip()


def measure(effort: Effort, device: str = DEVICE) -> Row:
    """Time one size, random sizes, and random sizes with four live at once, freed newest first.

    Args:
        effort: How often and how long.
        device: Whose memory: any that has 4 GiB.
    """
    return effort.run(_measure(effort, device))


async def _measure(effort: Effort, device: str) -> Row:
    sizes = [size for _, size in random_plan(STEPS, 1, SMALLEST, LARGEST)]
    return worst_of(
        QUESTION,
        {
            "fixed": replace(
                await _compare(effort, device, ONE_LIVE, [FIXED] * STEPS, [SMALLEST] * STEPS), bound=FIXED_BOUND
            ),
            "random": await _compare(effort, device, ONE_LIVE, sizes, [SMALLEST] * STEPS),
            "random few": await _compare(effort, device, FEW_LIVE, _by_fours(sizes), _by_fours([SMALLEST] * STEPS)),
        },
    )


async def _compare(effort: Effort, device: str, statement: str, plan: Sequence[object], hits: Sequence[object]) -> Row:
    async with AsyncMemoryPool(device, limit=LIMIT) as pool, AsyncMemoryPool(device, limit=LIMIT) as floor:
        # One segment for the most that is live at once, so that what is timed never grows.
        pool.allocate(FEW * LARGEST).free()
        floor.allocate(FEW * LARGEST).free()
        sides = [
            unrolled(statement, {"pool": pool, "plan": plan}, times=1),
            unrolled(statement, {"pool": floor, "plan": hits}, times=1),
        ]
        timings = await interleave(sides, effort, per_turn=STEPS)
    return compare(QUESTION, BOUND, *timings)


def _by_fours(sizes: Sequence[int]) -> list[tuple[int, ...]]:
    return list(zip(*[iter(sizes)] * FEW, strict=True))
