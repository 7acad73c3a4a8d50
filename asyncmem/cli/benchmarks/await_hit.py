"""What does an awaited allocation cost that the pool has ready, next to awaiting a coroutine that does nothing?"""

import sys
from typing import Final

from asyncmem import AsyncMemoryPool
from asyncmem.cli.benchmarks.measure import Effort, interleave, unrolled
from asyncmem.cli.benchmarks.result import Row, compare

# From 3.12 on, awaiting anything but a coroutine hands its value over in a StopIteration.
BOUND: Final = 1.0 if sys.version_info < (3, 12) else 1.5
QUESTION: Final = "await pool.allocate_async(4096) and drop, against await of a trivial coroutine"


async def trivial() -> None:
    """Do nothing, at the price of a coroutine."""


def measure(effort: Effort) -> Row:
    """Time an awaited hit; the one turn of the loop that it takes every thousand hits is in the figure."""
    return effort.run(_measure(effort))


async def _measure(effort: Effort) -> Row:
    async with AsyncMemoryPool("host", limit="64 MiB") as pool:
        ours = unrolled("await pool.allocate_async(4096)", {"pool": pool})
        floor = unrolled("await trivial()", {"trivial": trivial})
        timings = await interleave([ours, floor], effort)
    return compare(QUESTION, BOUND, *timings)
