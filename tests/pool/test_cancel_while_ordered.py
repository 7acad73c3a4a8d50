"""A request whose memory is on the way may still be cancelled, or lose its pool or lease: the memory goes back."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from asyncmem import AsyncMemoryPool, PoolClosed, RequestCancelled
from asyncmem.core import Buffer, Request
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


def ask_for_held(device: Simulated, pool: AsyncMemoryPool) -> tuple[Buffer, Request[Buffer]]:
    """Return all of a pool's memory, used by one stream, and a request for it on another, which waits."""
    one, two = device.create_stream("one"), device.create_stream("two")
    held = pool.allocate(8 * MIB, stream=one)
    one.launch(0.0, writes=[held])
    request = pool.allocate_async(8 * MIB, stream=two)
    assert isinstance(request, Request)
    return held, request


@pytest.mark.parametrize("fails", [False, True], ids=["ordered", "not_ordered"])
def test_cancelled_while_its_stream_is_ordered(monkeypatch: pytest.MonkeyPatch, *, fails: bool) -> None:
    """Whether the order succeeds or fails, `cancel()` holds: nothing is given out, and nothing is kept."""
    device = Simulated(latencies=Latencies.zero())
    with AsyncMemoryPool(device, limit=8 * MIB, segment_size=8 * MIB, stall_after=None) as pool:
        held, request = ask_for_held(device, pool)
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


@pytest.mark.filterwarnings("ignore::asyncmem.LeakWarning")  # what was on the way is nobody's yet when the pool closes
@pytest.mark.parametrize("fails", [False, True], ids=["ordered", "not_ordered"])
def test_pool_closed_while_a_stream_is_ordered(monkeypatch: pytest.MonkeyPatch, *, fails: bool) -> None:
    """What cannot be ordered is refused then, and waits for nothing; what can is granted all the same."""
    device = Simulated(latencies=Latencies.zero())
    pool = AsyncMemoryPool(device, limit=8 * MIB, segment_size=8 * MIB, stall_after=None)
    with pool:
        held, request = ask_for_held(device, pool)
        gate = Gate(fails=fails)
        with gate.over(monkeypatch):
            orders = threading.Thread(target=held.free)
            orders.start()
            assert gate.entered.wait(60)
            opened, closes = pool._opened, threading.Thread(target=pool.close)
            closes.start()
            while opened.closed is None:
                time.sleep(0.001)
            time.sleep(0.05)  # it refuses what waits just now
            gate.opened.set()
            orders.join()
            closes.join()
        assert request.block(10)
        if fails:
            with pytest.raises(PoolClosed):
                request.result()
        else:
            request.result().free()
        del request
    assert pool.stats().reserved_bytes == 0


def test_lease_ended_while_a_stream_is_ordered(monkeypatch: pytest.MonkeyPatch) -> None:
    """What cannot be ordered is refused, as all that waits in the lease is."""
    device = Simulated(latencies=Latencies.zero())
    ended: list[BaseException | None] = []
    with AsyncMemoryPool(device, limit=8 * MIB, segment_size=8 * MIB, stall_after=None) as pool:
        one, two = device.create_stream("one"), device.create_stream("two")
        lease = pool.lease(8 * MIB).__enter__()
        held = lease.allocate(8 * MIB, stream=one)
        one.launch(0.3, writes=[held])
        held.free()
        gate = Gate(fails=True)

        def ask() -> None:
            request = lease.allocate_async(8 * MIB, stream=two)
            ended.append(request.exception())

        with gate.over(monkeypatch):
            asks = threading.Thread(target=ask)
            asks.start()
            assert gate.entered.wait(60)
            lease.__exit__(None, None, None)
            gate.opened.set()
            asks.join()
        assert isinstance(ended.pop(), PoolClosed)
        pool.allocate(8 * MIB, stream=two, timeout=10).free()
        whole(pool)
