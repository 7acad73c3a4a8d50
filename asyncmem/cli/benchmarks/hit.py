"""What does an allocation cost that the pool has ready, next to making any Python object at all?"""

from typing import Final

from asyncmem import AsyncMemoryPool
from asyncmem.cli.benchmarks.measure import Effort, interleave, unrolled
from asyncmem.cli.benchmarks.result import Row, compare

BOUND: Final = 1.6
QUESTION: Final = "pool.allocate(4096) and drop, against object() and drop"


def measure(effort: Effort) -> Row:
    """Time a synchronous hit."""
    return effort.run(_measure(effort))


async def _measure(effort: Effort) -> Row:
    async with AsyncMemoryPool("host", limit="64 MiB") as pool:
        ours = unrolled("pool.allocate(4096)", {"pool": pool})
        floor = unrolled("object()", {"object": object})
        timings = await interleave([ours, floor], effort)
    return compare(QUESTION, BOUND, *timings)
