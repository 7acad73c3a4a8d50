"""Pinned buffers: neither handed out again nor given back, whatever happens to the buffer, until the last pin ends."""

from __future__ import annotations

import gc
import threading

import pytest

from asyncmem import AsyncMemoryPool, BufferReleased
from asyncmem.devices import Simulated
from tests.conservation import whole

from .support import MIB, quick_device


@pytest.fixture
def device() -> Simulated:
    """A device whose calls take no time."""
    return quick_device()


def test_pinned_memory_is_neither_reused_nor_given_back(device: Simulated) -> None:
    """The buffer ends at its free as ever; its memory stays where it is until it is unpinned."""
    with AsyncMemoryPool(device, limit=8 * MIB, segment_size=4 * MIB) as pool:
        buffer = pool.allocate(4 * MIB)
        pin = buffer.pin()
        address = buffer.address
        buffer.free()
        with pytest.raises(BufferReleased):
            _ = buffer.address
        assert (pin.address, pin.nbytes, pin.active) == (address, 4 * MIB, True)
        other = pool.allocate(4 * MIB)
        assert other.address != address
        other.free()
        pool.empty_cache()
        assert [one.address for one in pool.segments()] == [address]
        stats = pool.stats()
        assert (stats.pinned_bytes, stats.exported_bytes, stats.allocated_bytes) == (4 * MIB, 4 * MIB, 4 * MIB)
        pin.unpin()
        pin.unpin()
        assert not pin.active
        assert "ended" in repr(pin)
        assert pool.stats().pinned_bytes == 0
        assert pool.allocate(4 * MIB).address == address
        pool.empty_cache()
        assert not pool.segments()
        whole(pool)


def test_pins_count(device: Simulated) -> None:
    """The last one lets go, and the bytes count once."""
    with AsyncMemoryPool(device, limit=8 * MIB) as pool:
        buffer = pool.allocate(MIB)
        first, second = buffer.pin(), buffer.pin()
        assert pool.stats().pinned_bytes == MIB
        buffer.free()
        first.unpin()
        assert (pool.stats().pinned_bytes, pool.stats().allocated_bytes) == (MIB, MIB)
        second.unpin()
        assert (pool.stats().pinned_bytes, pool.stats().allocated_bytes) == (0, 0)


def test_buffer_outlives_its_pin(device: Simulated) -> None:
    """Unpinning frees nothing that is still held."""
    with AsyncMemoryPool(device, limit=8 * MIB) as pool, pool.allocate(MIB) as buffer:
        with buffer.pin() as pin:
            assert pin.active
        assert buffer.alive
        assert pool.stats().allocated_bytes == MIB


def test_dropping_unpins(device: Simulated) -> None:
    """As dropping a buffer frees it, on whatever thread that happens; a dropped buffer stays for its pin."""
    with AsyncMemoryPool(device, limit=8 * MIB) as pool:
        pin = pool.allocate(MIB).pin()
        gc.collect()
        assert pool.stats().allocated_bytes == MIB
        cycle: list[object] = [pin]
        cycle.append(cycle)
        del pin, cycle
        thread = threading.Thread(target=gc.collect)
        thread.start()
        thread.join()
        assert (pool.stats().pinned_bytes, pool.stats().allocated_bytes) == (0, 0)
        whole(pool)


def test_memory_goes_back_in_the_order_that_the_free_asked_for(device: Simulated) -> None:
    """A stream that was named at the free is waited for, though the fence comes only with the last pin."""
    home, other = device.create_stream(), device.create_stream()
    with AsyncMemoryPool(device, limit=4 * MIB, segment_size=4 * MIB) as pool:
        buffer = pool.allocate(4 * MIB, stream=home)
        pin = buffer.pin()
        buffer.use_on(other)
        other.launch(1.0, writes=[buffer])
        buffer.free()
        pin.unpin()
        again = pool.allocate(4 * MIB, stream=home, timeout=60)
        home.launch(1.0, writes=[again])
        again.free()
        device.run_until_idle()
        whole(pool)


def test_pinned_buffer_outlives_its_pool(device: Simulated) -> None:
    """Closing gives back what is free; what is pinned follows when it is unpinned."""
    pool = AsyncMemoryPool(device, limit=8 * MIB)
    pool.__enter__()
    buffer = pool.allocate(MIB)
    pin = buffer.pin()
    buffer.free()
    pool.close()
    assert device.reserved > 0
    pin.unpin()
    for _ in range(6000):
        if device.reserved == 0:
            break
        threading.Event().wait(0.01)
    assert device.reserved == 0


def test_empty_buffer_has_nothing_to_pin(device: Simulated) -> None:
    """It may be pinned all the same."""
    with AsyncMemoryPool(device, limit=8 * MIB) as pool, pool.allocate(0) as empty, empty.pin() as pin:
        assert (pin.address, pin.nbytes, pool.stats().pinned_bytes) == (0, 0, 0)
