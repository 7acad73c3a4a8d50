"""What does it cost that a producer allocates on one stream and a consumer frees on another?

Between the two the consumer's stream is ordered behind the producer's, as it must be for the driver's allocator and for
any use of the block. Both streams are idle but for what the allocators put there, so the times are the host's alone.
"""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from typing import Final

from asyncmem.cli.benchmarks.device.measured import Figure, Measured, timed
from asyncmem.cli.benchmarks.measure import UNROLL, Effort, plainly, time_apart, unrolled
from asyncmem.cli.benchmarks.peers.ours import Ours
from asyncmem.cli.benchmarks.peers.peer import Crossing, Peer
from asyncmem.cli.benchmarks.peers.way import FLOOR

QUESTION: Final = "allocate 1 MiB on stream A, order B behind A, free on B; per block"
SIZE: Final = 1 << 20
COUNTED_TURNS: Final = 1000


def measure(peer: Peer, effort: Effort) -> Iterator[Measured]:
    """Time it, and count what the allocator asks of its driver in steady state, where it tells."""
    yield from _rows(peer, effort)
    if isinstance(peer, Ours):
        with peer.tuned(fence_every=1):
            yield from (replace(one, case="a fence each") for one in _rows(peer, effort))


def _rows(peer: Peer, effort: Effort) -> Iterator[Measured]:
    opened = peer.crossing()
    if opened is None:
        return
    with ExitStack() as stack:
        crossings = [stack.enter_context(opened)]
        beside = None if peer.beside is None else peer.beside.crossing()
        if beside is not None:
            crossings.append(stack.enter_context(beside))
        yield plainly(_measure(peer, effort, crossings))


async def _measure(peer: Peer, effort: Effort, crossings: list[Crossing]) -> Measured:
    floor = unrolled(FLOOR.once(str(SIZE)), FLOOR.names)
    sides = [unrolled(one.statement.format(size=SIZE), one.names) for one in crossings]
    floor_timing, theirs, *beside = await time_apart([(side, UNROLL) for side in (floor, *sides)], effort)
    crossing, ours = crossings[0], beside[0] if beside else None
    before = crossing.counts()
    await sides[0](COUNTED_TURNS)
    unlike = peer.unlike.get("cross_stream")
    found = timed("cross_stream", peer.name, theirs, floor_timing, beside=ours, unlike=unlike)
    after = crossing.counts()
    waited = after.get("waits", 0) - before.get("waits", 0)
    broken = f"{waited} requests had to wait" if waited else ""
    return replace(found, figures=_per_block(before, after), broken=broken)


def _per_block(before: Mapping[str, int], after: Mapping[str, int]) -> Mapping[str, Figure]:
    blocks = COUNTED_TURNS * UNROLL
    return {f"{name}_per_block": round((after[name] - before[name]) / blocks, 3) for name in after}
