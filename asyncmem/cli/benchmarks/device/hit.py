"""What does an allocation of 1 MiB cost that the allocator has ready?"""

from collections.abc import Iterator
from typing import Final

from asyncmem.cli.benchmarks.device.loops import hit
from asyncmem.cli.benchmarks.device.measured import Measured
from asyncmem.cli.benchmarks.measure import Effort
from asyncmem.cli.benchmarks.peers.peer import Peer

QUESTION: Final = "allocate 1 MiB and give it back, warm"
SIZE: Final = 1 << 20


def measure(peer: Peer, effort: Effort) -> Iterator[Measured]:
    """Time one size, over and over."""
    yield hit("hit", peer, effort, SIZE)
