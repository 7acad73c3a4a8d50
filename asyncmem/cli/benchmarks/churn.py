"""What does an allocation cost that no cache can serve: random sizes, blocks split and merged all the time?"""

import math
import random
from typing import Final

from asyncmem import AsyncMemoryPool
from asyncmem.cli.benchmarks.measure import Effort, interleave, unrolled
from asyncmem.cli.benchmarks.result import Row, compare

BOUND: Final = 5.0
QUESTION: Final = "random sizes 512 B to 16 MiB, 1000 live, allocate and drop, against object() in the same loop"
LIVE: Final = 1000
SMALLEST: Final = 512
LARGEST: Final = 16 << 20
STEPS: Final = 5000

Plan = list[tuple[int, int]]


def random_plan(steps: int, live: int, smallest: int, largest: int) -> Plan:
    """Draw (slot, size) pairs: slots evenly, sizes evenly over their logarithm, so each order of size is common."""
    draw = random.Random(0)  # noqa: S311 - the same numbers every time are what is wanted
    low, high = math.log(smallest), math.log(largest)
    return [(draw.randrange(live), int(math.exp(draw.uniform(low, high)))) for _ in range(steps)]


def measure(effort: Effort) -> Row:
    """Time the replacement of a random one of the live buffers; the loop over the plan is in both sides."""
    return effort.run(_measure(effort))


async def _measure(effort: Effort) -> Row:
    plan = random_plan(STEPS, LIVE, SMALLEST, LARGEST)
    async with AsyncMemoryPool("host", limit="8 GiB") as pool:
        live: list[object] = [pool.allocate(size) for _, size in random_plan(LIVE, LIVE, SMALLEST, LARGEST)]
        names = {"pool": pool, "object": object, "plan": plan, "live": live}
        sides = [
            unrolled("for slot, size in plan: live[slot] = pool.allocate(size)", names, times=1),
            unrolled("for slot, size in plan: live[slot] = object()", names | {"live": [object()] * LIVE}, times=1),
            unrolled("for slot, size in plan: pass", names, times=1),
        ]
        ours, floor, bare = await interleave(sides, effort, per_turn=STEPS)
        live.clear()
    return compare(QUESTION, BOUND, ours, floor, loop_ns=round(bare.ns, 2))
