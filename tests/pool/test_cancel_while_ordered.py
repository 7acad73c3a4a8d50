"""A request whose memory is on the way may still be cancelled: it ends as cancelled, and the memory goes back."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from asyncmem import AsyncMemoryPool, RequestCancelled
from asyncmem.devices import Latencies, Simulated
from asyncmem.devices.simulated.stream import SimulatedStream
from asyncmem.errors import DeviceError
from tests.conservation import whole

MIB = 1 << 20


class Gate:
    """A driver's call that stands still until it is let through."""

    def __init__(self, *, fails: bool) -> None:
        self.entered, self.opened, self.fails = threading.Event(), threading.Event(), fails

    @contextmanager
    def over(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        """Put it in front of `Stream.wait`."""
        real = SimulatedStream.wait

        def wait(stream: SimulatedStream, fence: object) -> None:
            self.entered.set()
            assert self.opened.wait(60)
            if self.fails:
                raise DeviceError("wait", code=1, code_name="NO", device="simulated:0")
            real(stream, fence)  # type: ignore[arg-type]

        monkeypatch.setattr(SimulatedStream, "wait", wait)
        yield
        monkeypatch.setattr(SimulatedStream, "wait", real)


@pytest.mark.parametrize("fails", [False, True], ids=["ordered", "not_ordered"])
def test_cancelled_while_its_stream_is_ordered(monkeypatch: pytest.MonkeyPatch, *, fails: bool) -> None:
    """Whether the order succeeds or fails, `cancel()` holds: nothing is given out, and nothing is kept."""
    device = Simulated(latencies=Latencies.zero())
    with AsyncMemoryPool(device, limit=8 * MIB, segment_size=8 * MIB, stall_after=None) as pool:
        one, two = device.create_stream("one"), device.create_stream("two")
        held = pool.allocate(8 * MIB, stream=one)
        one.launch(0.0, writes=[held])
        request = pool.allocate_async(8 * MIB, stream=two)
        gate = Gate(fails=fails)
        with gate.over(monkeypatch):
            orders = threading.Thread(target=held.free)
            orders.start()
            assert gate.entered.wait(60)
            assert request.cancel()
            assert not request.done()  # the call of the driver is under way
            gate.opened.set()
            orders.join()
        assert request.block(10)
        assert request.cancelled()
        assert not request.cancel()
        with pytest.raises(RequestCancelled):
            request.result()
        stats = pool.stats()
        assert (stats.handed_back, stats.cancellations) == ((0, 1) if fails else (1, 0))
        whole(pool)
