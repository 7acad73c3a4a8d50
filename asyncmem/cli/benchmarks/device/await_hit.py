"""What does an awaited 1 MiB cost that the pool has ready, next to awaiting a coroutine that does nothing?"""

from collections.abc import Iterator
from typing import Final

from asyncmem.cli.benchmarks.await_hit import trivial
from asyncmem.cli.benchmarks.device.hit import SIZE
from asyncmem.cli.benchmarks.device.measured import Measured, timed
from asyncmem.cli.benchmarks.measure import UNROLL, Effort, time_apart, unrolled
from asyncmem.cli.benchmarks.peers.family import OURS
from asyncmem.cli.benchmarks.peers.peer import Peer

QUESTION: Final = "await 1 MiB and give it back, warm; the floor is an awaited trivial coroutine"
FAMILIES: Final = (OURS,)


def measure(peer: Peer, effort: Effort) -> Iterator[Measured]:
    """Time an awaited hit; nobody else has anything to await."""
    yield effort.run(_measure(peer, effort))


async def _measure(peer: Peer, effort: Effort) -> Measured:
    with peer.opened() as way:
        ours = unrolled(f"await pool.allocate_async({SIZE})", way.names)
        floor = unrolled("await trivial()", {"trivial": trivial})
        timings = await time_apart([(ours, UNROLL), (floor, UNROLL)], effort)
    return timed("await_hit", peer.name, *timings)
