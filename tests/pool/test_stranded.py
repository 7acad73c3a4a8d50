"""Memory that the device did not take back is offered again, whoever failed to give it back."""

import threading

import pytest

from asyncmem import AsyncMemoryPool, DeviceError
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
            self.meeting.wait(60)
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
        pool.allocate(8 * MIB, timeout=60).free()
        pool.check()


def test_what_is_taken_while_it_goes_back_stays() -> None:
    """Doors ask nobody: the segment that one has taken from is left out, and the others go."""
    with AsyncMemoryPool(Simulated(), limit=8 * MIB, segment_size=4 * MIB) as pool:
        ended = threading.Event()

        def take() -> None:
            while not ended.is_set():
                taken = pool.try_allocate(MIB)
                if taken is not None:
                    assert any(one.address <= taken.address < one.address + one.nbytes for one in pool.segments())
                    taken.free()

        threads = [threading.Thread(target=take) for _ in range(2)]
        for thread in threads:
            thread.start()
        try:
            for _ in range(200):
                first, second = pool.allocate(4 * MIB, timeout=60), pool.allocate(3 * MIB, timeout=60)
                first.free()
                second.free()
                pool.empty_cache()
                pool.check()
        finally:
            ended.set()
            for thread in threads:
                thread.join()
        pool.empty_cache()
        assert pool.stats().reserved_bytes == 0
