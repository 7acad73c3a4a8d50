"""What does one of a hundred buffers cost when they are asked for together?"""

import random
from typing import Final

from asyncmem import AsyncMemoryPool
from asyncmem.cli.benchmarks.measure import Effort, interleave, unrolled
from asyncmem.cli.benchmarks.result import Row, compare, worst_of

BOUND: Final = 1.2
QUESTION: Final = "allocate_batch of 100, awaited, iterated and dropped, per buffer, against object() and drop"
COUNT: Final = 100
LEAST: Final = 1024
MOST: Final = 1 << 20


def measure(effort: Effort) -> Row:
    """Time whole batches, of equal sizes and of random ones, and the same number of objects made one by one."""
    draw = random.Random(1)  # noqa: S311 - the same sizes every time are what is wanted
    sizes = {
        "equal": [4096] * COUNT,
        "mixed": [round(LEAST * (MOST / LEAST) ** draw.random()) for _ in range(COUNT)],
    }
    return worst_of(QUESTION, {case: effort.run(_measure(some, effort)) for case, some in sizes.items()})


async def _measure(sizes: list[int], effort: Effort) -> Row:
    async with AsyncMemoryPool("host", limit="64 MiB") as pool:
        ours = unrolled(
            "for buffer in await pool.allocate_batch(sizes): pass\ndel buffer",
            {"pool": pool, "sizes": sizes},
            times=1,
        )
        floor = unrolled("object()", {"object": object}, times=COUNT)
        timings = await interleave([ours, floor], effort, per_turn=COUNT)
    return compare(QUESTION, BOUND, *timings, buffers=COUNT)
