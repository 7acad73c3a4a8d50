"""What does an allocation cost that no cache can serve: random sizes, blocks split and merged all the time?"""

from collections.abc import Iterator
from typing import Final

from asyncmem.cli.benchmarks.churn import LARGEST, LIVE, SMALLEST, STEPS, random_plan
from asyncmem.cli.benchmarks.device.loops import circular, over_plan
from asyncmem.cli.benchmarks.device.measured import Measured
from asyncmem.cli.benchmarks.measure import Effort
from asyncmem.cli.benchmarks.peers.peer import Peer

QUESTION: Final = "random sizes 512 B to 16 MiB, 1000 live: give one back and allocate another"


def measure(peer: Peer, effort: Effort) -> Iterator[Measured]:
    """Time the replacement of a random one of the live blocks; the loop over the plan is in both sides."""
    yield over_plan("churn", peer, effort, circular(iter(random_plan(STEPS, LIVE, SMALLEST, LARGEST))))
