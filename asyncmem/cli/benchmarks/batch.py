"""What does one of a hundred buffers cost when they are asked for together?"""

from typing import Final

from asyncmem import AsyncMemoryPool
from asyncmem.cli.benchmarks.measure import Effort, interleave, unrolled
from asyncmem.cli.benchmarks.result import Row, compare

BOUND: Final = 1.2
QUESTION: Final = "allocate_batch of 100, awaited, iterated and dropped, per buffer, against object() and drop"
COUNT: Final = 100


def measure(effort: Effort) -> Row:
    """Time whole batches of equal sizes, and the same number of objects made one by one."""
    return effort.run(_measure(effort))


async def _measure(effort: Effort) -> Row:
    async with AsyncMemoryPool("host", limit="64 MiB") as pool:
        ours = unrolled(
            "for buffer in await pool.allocate_batch(sizes): pass\ndel buffer",
            {"pool": pool, "sizes": [4096] * COUNT},
            times=1,
        )
        floor = unrolled("object()", {"object": object}, times=COUNT)
        timings = await interleave([ours, floor], effort, per_turn=COUNT)
    return compare(QUESTION, BOUND, *timings, buffers=COUNT)
