"""What does it cost that a producer allocates on one stream and a consumer frees on another?

Twice: as a program must that uses the block, with the consumer's stream ordered behind the producer's, and without
that. Both streams are idle but for what the allocators themselves put there, so the times are the host's alone.
"""

from collections.abc import Iterator, Mapping
from typing import Final

from asyncmem.cli.benchmarks.device.measured import Figure, Measured, timed
from asyncmem.cli.benchmarks.measure import UNROLL, Effort, plainly, time_apart, unrolled
from asyncmem.cli.benchmarks.peers.peer import Crossing, Peer
from asyncmem.cli.benchmarks.peers.way import FLOOR

QUESTION: Final = "allocate 1 MiB on stream A, order B behind A, free on B; per block"
SIZE: Final = 1 << 20
CASES: Final = {"ordered": True, "not ordered": False}
COUNTED_TURNS: Final = 1000


def measure(peer: Peer, effort: Effort) -> Iterator[Measured]:
    """Time both ways, and count what the allocator asks of its driver in steady state, where it tells."""
    for case, ordered in CASES.items():
        opened = peer.crossing(ordered=ordered)
        if opened is None:
            return
        with opened as crossing:
            yield plainly(_measure(peer, effort, case, crossing))


async def _measure(peer: Peer, effort: Effort, case: str, crossing: Crossing) -> Measured:
    ours = unrolled(crossing.statement.format(size=SIZE), crossing.names)
    floor = unrolled(FLOOR.once(str(SIZE)), FLOOR.names)
    timings = await time_apart([(ours, UNROLL), (floor, UNROLL)], effort)
    before = crossing.counts()
    await ours(COUNTED_TURNS)
    ours_timing, floor_timing = timings
    return timed(
        "cross_stream",
        peer.name,
        ours_timing,
        floor_timing,
        case=case,
        unlike=peer.unlike.get("cross_stream"),
        **_per_block(before, crossing.counts()),
    )


def _per_block(before: Mapping[str, int], after: Mapping[str, int]) -> Mapping[str, Figure]:
    blocks = COUNTED_TURNS * UNROLL
    return {f"{name}_per_block": round((after[name] - before[name]) / blocks, 3) for name in after}
