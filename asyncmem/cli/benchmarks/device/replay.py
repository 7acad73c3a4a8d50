"""What do a recorded program's allocations and frees cost, from no memory at all to its end?

The program's own work is left out, and all its streams are one, so that everybody does the same. Each run begins with
an allocator that has no memory of the device; what it gets on the way is in the time.
"""

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Final

from asyncmem import AsyncMemoryPool
from asyncmem.cli.benchmarks.device.measured import Measured, timed
from asyncmem.cli.benchmarks.device.where import Where
from asyncmem.cli.benchmarks.measure import Effort, Loop, collector_off, plainly, summary, unrolled
from asyncmem.cli.benchmarks.peers.ours import Ours
from asyncmem.cli.benchmarks.peers.peer import Peer
from asyncmem.cli.benchmarks.peers.way import FLOOR, Plan, Way
from asyncmem.replay import Trace, read

QUESTION: Final = "a recorded program's allocations and frees, one after another from no memory at all; per operation"
RUNS: Final = 3
WARM_UP: Final = 1
REST_SECONDS: Final = 0.2
"""How long a card is left alone before each run: it still clears what the run before gave back, and who asks waits."""


def measure(peer: Peer, effort: Effort, where: Where) -> Iterator[Measured]:
    """Time each recording's steps, in turn with asyncmem's pool and the floor; asyncmem's own also over pages."""
    for file in where.traces:
        trace, name = read(file), Path(file).stem
        yield _measure(peer, effort, trace, where, name)
        if isinstance(peer, Ours) and peer.device.kind != "host":
            with peer.tuned(segments="paged"):
                yield _measure(peer, effort, trace, where, f"{name}, paged")


def plan_of(trace: Trace) -> Plan:
    """Write a recording as a plan whose steps either allocate into an empty slot or empty one; nothing for 0 bytes."""
    steps = trace.steps()
    sizes: dict[int, int] = {}
    plan = []
    for slot, nbytes in zip(steps.slot.tolist(), steps.nbytes.tolist(), strict=True):
        if nbytes > 0:
            sizes[slot] = nbytes
            plan.append((slot, nbytes, 0))
        elif slot in sizes:
            plan.append((slot, 0, sizes.pop(slot)))
    return plan + [(slot, 0, nbytes) for slot, nbytes in sizes.items()]


def _measure(peer: Peer, effort: Effort, trace: Trace, where: Where, case: str) -> Measured:
    plan = plan_of(trace)
    peers = [peer] if peer.beside is None else [peer, peer.beside]
    times: list[list[float]] = [[] for _ in peers]
    floor: list[float] = []
    reserved = 0
    with collector_off():
        for run in range(WARM_UP + max(2, round(RUNS * effort.share))):
            for one, taken in zip(peers, times, strict=True):
                time.sleep(REST_SECONDS * effort.share if where.device.startswith("cuda") else 0)
                with one.opened() as way:
                    taken.append(_through(way, plan, trace.allocations))
                    if one is peer:
                        reserved = _reserved(way)
            floor.append(_through(FLOOR, plan, trace.allocations))
            if run < WARM_UP:
                for some in (*times, floor):
                    some.clear()
    theirs, *beside = map(summary, times)
    figures = {"reserved_over_requested": round(reserved / trace.peak_requested, 4)} if reserved else {}
    ours = beside[0] if beside else None
    return replace(timed("replay", peer.name, theirs, summary(floor), case=case, beside=ours), figures=figures)


def _through(way: Way, plan: Plan, slots: int) -> float:
    live: list[object] = [None] * slots
    loop = unrolled(way.obey(), {**way.names, "plan": plan, "live": live}, times=1)
    return plainly(_once(loop)) / max(1, len(plan))


async def _once(loop: Loop) -> int:
    return await loop(1)


def _reserved(way: Way) -> int:
    pool = way.names.get("pool")
    return pool.stats().peak_reserved if isinstance(pool, AsyncMemoryPool) else 0
