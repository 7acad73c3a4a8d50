"""Does a large block cost more than one of 1 MiB?"""

from collections.abc import Iterator
from typing import Final

from asyncmem.cli.benchmarks.churn import random_plan
from asyncmem.cli.benchmarks.device.loops import circular, hit, over_plan
from asyncmem.cli.benchmarks.device.measured import Measured
from asyncmem.cli.benchmarks.measure import Effort
from asyncmem.cli.benchmarks.peers.ours import Ours
from asyncmem.cli.benchmarks.peers.peer import Peer

QUESTION: Final = "allocate 1 MiB to 1 GiB and give it back, warm: fixed sizes, and random ones with 1 and with 8 live"
FIXED: Final = {"16 MiB": 16 << 20, "1 GiB": 1 << 30}
SMALLEST: Final = 1 << 20
LARGEST: Final = 1 << 30
STEPS: Final = 1000
LIVE: Final = (1, 8)


def measure(peer: Peer, effort: Effort) -> Iterator[Measured]:
    """Time fixed sizes as `hit` does, and random ones in a loop over a plan.

    asyncmem's pool does the same with 1 MiB in turn: a second later the processor may be at another pace.
    """
    ours = isinstance(peer, Ours)
    for case, size in FIXED.items():
        yield hit("large", peer, effort, size, case=case, against=SMALLEST if ours else None)
    one_size = circular((0, SMALLEST) for _ in range(STEPS)) if ours else None
    for live in LIVE:
        plan = circular(iter(random_plan(STEPS, live, SMALLEST, LARGEST)))
        yield over_plan("large", peer, effort, plan, case=f"random, {live} live", against=one_size)
