"""Memory that the device did not take back is offered again, whoever failed to give it back."""

import threading

import pytest

from asyncmem import AsyncMemoryPool, Buffer, DeviceError
from asyncmem.devices import Latencies, Segment, Simulated

MIB = 1 << 20


class Stubborn(Simulated):
    """A device that takes nothing back until told to; two threads that try meet there."""

    def __init__(self) -> None:
        super().__init__(latencies=Latencies.zero())
        self.stubborn = True
        self.meeting = threading.Barrier(2)

    def free_segment(self, segment: Segment) -> None:
        if self.stubborn:
            self.meeting.wait(10)
            raise DeviceError("free_segment", code=999, code_name="UNKNOWN")
        super().free_segment(segment)


def test_what_two_threads_failed_to_give_back_at_once_is_all_offered_again() -> None:
    """The failure of one forgets nothing of the other's."""
    device = Stubborn()
    with AsyncMemoryPool(device, limit=8 * MIB, segment_size=4 * MIB) as pool:
        first, second = pool.allocate(4 * MIB), pool.allocate(4 * MIB)
        first.free()
        failed: list[DeviceError] = []

        def trim() -> None:
            try:
                pool.empty_cache()
            except DeviceError as error:
                failed.append(error)

        thread = threading.Thread(target=trim)
        thread.start()
        while not device.meeting.n_waiting:
            pass
        second.free()
        with pytest.raises(DeviceError):
            pool.empty_cache()
        thread.join()
        assert failed
        device.stubborn = False
        pool.allocate(8 * MIB, timeout=10).free()
        pool.check()


class Busy:
    """A core of which another thread's door takes the first block just after its free segments have been listed."""

    def __init__(self, pool: AsyncMemoryPool) -> None:
        self.taken: list[Buffer] = []
        self._pool = pool
        self._core = pool.flow.core

    def __getattr__(self, name: str) -> object:
        return getattr(self._core, name)

    def empty_segments(self) -> list[object]:
        found = list(self._core.empty_segments())
        if not self.taken:
            taken = self._pool.try_allocate(MIB)
            assert taken is not None
            self.taken.append(taken)
        return found


def test_what_is_taken_while_it_goes_back_stays() -> None:
    """Doors ask nobody: the segment that one has taken from is left out, and the others go."""
    with AsyncMemoryPool(Simulated(), limit=8 * MIB, segment_size=4 * MIB) as pool:
        first, second = pool.allocate(4 * MIB), pool.allocate(4 * MIB)
        first.free()
        second.free()
        pool.flow.supply._core = busy = Busy(pool)  # type: ignore[assignment]
        pool.empty_cache()
        pool.flow.supply._core = pool.flow.core
        assert pool.stats().reserved_bytes == 4 * MIB
        pool.check()
        busy.taken.pop().free()
