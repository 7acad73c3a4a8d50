"""What the tests of this folder share: a device without delays, and a pool whose worker is steps of the loop."""

from asyncmem import AsyncMemoryPool
from asyncmem.devices import Latencies, Simulated
from asyncmem.testing.stepworker import StepWorker

MIB = 1 << 20


class SteppedPool(AsyncMemoryPool):
    """A pool whose worker is steps of the loop, so that every run is the same."""

    _worker_factory = StepWorker


def quick_device(capacity: int = 64 * MIB, *, backing: bool = False, beside: Simulated | None = None) -> Simulated:
    """Make a device whose calls take no time."""
    return Simulated(capacity, latencies=Latencies.zero(), backing=backing, beside=beside)
