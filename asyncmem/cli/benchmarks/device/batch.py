"""What does one of a hundred blocks cost that are needed together?"""

import random
from collections.abc import Iterator
from typing import Final

from asyncmem.cli.benchmarks.churn import random_plan
from asyncmem.cli.benchmarks.device.loops import opened
from asyncmem.cli.benchmarks.device.measured import Measured, timed
from asyncmem.cli.benchmarks.measure import Effort, time_apart, unrolled
from asyncmem.cli.benchmarks.peers.peer import Peer
from asyncmem.cli.benchmarks.peers.way import Way

QUESTION: Final = "a hundred blocks, all live at once, each looked at and given back; per block"
COUNT: Final = 100
EQUAL: Final = 64 << 10
TOGETHER: Final = "for block in await pool.allocate_batch(sizes): pass\ndel block"
"""What asyncmem has for it."""


def sizes() -> dict[str, list[int]]:
    """Answer the sizes of each case: all the same, and mixed from 512 B to 1 MiB."""
    mixed = [size for _, size in random_plan(COUNT, 1, 512, 1 << 20)]
    random.Random(0).shuffle(mixed)  # noqa: S311 - the same order every time is what is wanted
    return {"equal": [EQUAL] * COUNT, "mixed": mixed}


def measure(peer: Peer, effort: Effort) -> Iterator[Measured]:
    """Time whole batches; an allocator without a call for them is asked a hundred times."""
    for case, wanted in sizes().items():
        yield effort.run(_measure(peer, effort, case, wanted))


async def _measure(peer: Peer, effort: Effort, case: str, wanted: list[int]) -> Measured:
    with opened(peer) as ways:
        sides = [
            unrolled(statement, {**way.names, "sizes": wanted}, times=1)
            for way, statement in zip(ways, _statements(peer, ways), strict=True)
        ]
        theirs, floor, *beside = await time_apart([(side, COUNT) for side in sides], effort)
    ours = beside[0] if beside else None
    return timed("batch", peer.name, theirs, floor, case=case, beside=ours, unlike=peer.unlike.get("batch"))


def _statements(peer: Peer, ways: list[Way]) -> list[str]:
    theirs, floor, *beside = [way.hundred() for way in ways]
    return [TOGETHER if peer.awaits else theirs, floor, *(TOGETHER for _ in beside)]
