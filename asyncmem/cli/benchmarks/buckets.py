"""What does it cost to take a host buffer that was kept and to return it, next to making any Python object at all?"""

from typing import Final

from asyncmem import BucketPool
from asyncmem.cli.benchmarks.measure import Effort, interleave, unrolled
from asyncmem.cli.benchmarks.result import Row, compare

BOUND: Final = 4.0
QUESTION: Final = "BucketPool.try_get(1 MiB) and return_buffer, against object() and drop"
MIB: Final = 1 << 20


def measure(effort: Effort) -> Row:
    """Time a hit and the way back."""
    return effort.run(_measure(effort))


async def _measure(effort: Effort) -> Row:
    buffers: BucketPool[bytearray] = BucketPool()
    buffers.return_buffer(bytearray(MIB), MIB)
    ours = unrolled("buffers.return_buffer(buffers.try_get(1048576), 1048576)", {"buffers": buffers})
    floor = unrolled("object()", {"object": object})
    return compare(QUESTION, BOUND, *await interleave([ours, floor], effort))
