"""What the tests of this folder share: a device without delays, and a pool whose worker is steps of the loop."""

from asyncmem import AsyncMemoryPool
from asyncmem.devices import Latencies, Simulated

MIB = 1 << 20


def quick_device(capacity: int = 64 * MIB, *, backing: bool = False, beside: Simulated | None = None) -> Simulated:
    """Make a device whose calls take no time."""
    return Simulated(capacity, latencies=Latencies.zero(), backing=backing, beside=beside)


class ClockOf:
    """A device's time in place of an event loop's, for a pool that is used in synchronous code alone.

    So what a pool does in view of its age, and of the time that moves have taken, is the same on any machine.

    Args:
        pool: An open pool.
        device: Its device.
        age: Seconds that the pool has lived already.
    """

    loop = future_type = None

    def __init__(self, pool: AsyncMemoryPool, device: Simulated, age: float = 0.0) -> None:
        self._device = device
        self._ahead = 0.0
        opened = pool._opened
        opened.executor.clock = lambda: device.now
        opened.core.set_loop(self)
        self._ahead = age

    def now(self) -> float:
        return self._device.now + self._ahead

    def is_running_here(self) -> bool:
        return False

    def is_closed(self) -> bool:
        return False
