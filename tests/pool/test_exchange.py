"""Segments that are free go back to the device in place of those that come, before more is reserved than ever."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from asyncmem import AsyncMemoryPool, Buffer, OutOfMemoryError
from asyncmem.devices import Latencies, Simulated
from asyncmem.testing import SteppedPool

from .support import MIB, ClockOf, quick_device

SEGMENT = 8 * MIB


@contextmanager
def opened(device: Simulated, age: float = 1000.0, **options: object) -> Iterator[AsyncMemoryPool]:
    """Open a pool of small segments whose life is told by the device's clock, and is long."""
    settings = {"segment_size": SEGMENT, "small_limit": 4096, "min_free": 0, "stall_after": None, **options}
    with SteppedPool(device, **settings) as pool:  # type: ignore[arg-type]
        ClockOf(pool, device, age)
        yield pool
        pool.check()


def one_after_another(pool: AsyncMemoryPool, *mib: int) -> None:
    """Have one buffer at a time, of each size in turn."""
    for size in mib:
        pool.allocate(size * MIB).free()


def test_what_is_too_small_goes_before_more_comes() -> None:
    """A program whose sizes grow needs its largest, and not the sum of them."""
    with opened(quick_device(512 * MIB)) as pool:
        one_after_another(pool, 8, 12, 18, 27, 40)
        stats = pool.stats()
    assert stats.peak_reserved == 40 * MIB
    assert stats.trims == 4


def test_no_more_goes_than_makes_room() -> None:
    """The most that was reserved may be reserved again: up to there nothing goes, the largest first beyond it."""
    with opened(quick_device(512 * MIB)) as pool:
        held = [pool.allocate(size * MIB) for size in (8, 9, 10, 11)]
        for buffer in held:
            buffer.free()
        pool.allocate(12 * MIB).free()
        assert [one.nbytes // MIB for one in pool.segments()] == [8, 9, 12]
        pool.empty_cache()
        one_after_another(pool, 13, 14)  # both fit below the most that there was
        assert pool.stats().reserved_bytes == 27 * MIB


def test_what_the_device_is_not_done_with_stays() -> None:
    """It could not go back before; so the most reserved rises, and nobody waits for it."""
    device = quick_device(512 * MIB)
    stream = device.create_stream()
    with opened(device) as pool:
        buffer = pool.allocate(8 * MIB, stream=stream)
        stream.launch(1.0, writes=[buffer])
        buffer.free()
        pool.allocate(16 * MIB, stream=stream).free()
        assert device.now < 1.0
        assert pool.stats().peak_reserved == 24 * MIB
        stream.synchronize_blocking()
        one_after_another(pool, 24)
        assert pool.stats().peak_reserved == 24 * MIB


@pytest.mark.parametrize(("patience", "reserved"), [("1%", 16), ("0.01%", 24), (60.0, 16), (0.05, 24), (0.0, 24)])
def test_a_patient_pool_waits_for_it(patience: float | str, reserved: int) -> None:
    """As long as it may: for each request, or for a share of the pool's life."""
    device = Simulated(512 * MIB, clock="wall", latencies=Latencies.zero())
    stream = device.create_stream()
    with opened(device, patience=patience) as pool:
        buffer = pool.allocate(8 * MIB, stream=stream)
        work = 0.2 if reserved == 16 else 1.0
        stream.launch(work, writes=[buffer])
        began = device.now
        buffer.free()
        pool.allocate(16 * MIB, stream=stream).free()
        assert pool.stats().peak_reserved == reserved * MIB
        assert (device.now - began >= work) == (reserved == 16)
    device.close()


def test_patience_has_no_wait_for_what_would_not_help() -> None:
    """Below the most that was reserved, memory comes at once."""
    device = quick_device(512 * MIB)
    stream = device.create_stream()
    with opened(device, patience=10.0) as pool:
        one_after_another(pool, 64)
        pool.empty_cache()
        buffer = pool.allocate(8 * MIB, stream=stream)
        stream.launch(1.0, writes=[buffer])
        buffer.free()
        pool.allocate(16 * MIB, stream=stream).free()
        assert device.now < 1.0


def test_a_segment_that_is_much_larger_stays() -> None:
    """It is worth more than what comes: little memory is no reason to give much of it back."""
    with opened(quick_device(512 * MIB), small_limit=MIB) as pool:
        one_after_another(pool, 64)
        small = pool.allocate(1024)
        assert len(pool.segments()) == 2
        small.free()


def test_it_takes_a_small_share_of_the_life() -> None:
    """A program whose sizes go up and down for ever keeps what it needs in the end."""
    device = Simulated(8192 * MIB)  # whose calls take their time
    with opened(device, age=0.0) as pool:
        began = device.now
        draw = random.Random(0)
        for _ in range(300):
            one_after_another(pool, draw.randrange(1, 33), draw.randrange(33, 65))
        moved = pool._opened.core.scheduler.gauges()["moved"]
        assert 0 < moved <= 0.02 * (device.now - began) + 0.002
        assert pool.stats().trims < 30


def test_what_is_kept_ready_is_not_given_back() -> None:
    """`pregrow` names what is to be there, whoever asks for how much."""
    with opened(quick_device(512 * MIB), pregrow="32 MiB") as pool:
        before = pool.stats().reserved_bytes
        one_after_another(pool, 34)
        assert pool.stats().reserved_bytes >= before >= 32 * MIB


@pytest.mark.parametrize("nth", [1, 2])
def test_a_device_that_takes_nothing_back_gives_all_the_same(nth: int) -> None:
    """Growth goes on; what did not go counts until it has, and is offered again."""
    device = quick_device(512 * MIB)
    with opened(device) as pool:
        first = [pool.allocate(8 * MIB), pool.allocate(9 * MIB)]
        for buffer in first:
            buffer.free()
        device.fail("free_segment", nth)
        pool.allocate(20 * MIB).free()
        assert device.reserved > 20 * MIB
        pool.empty_cache()
        assert device.reserved == pool.stats().reserved_bytes == 0
    assert device.reserved == 0


def test_growth_that_is_refused_has_given_back_for_nothing() -> None:
    """The error is the device's, and the pool can do what it could."""
    device = quick_device(64 * MIB)
    with opened(device, limit="512 MiB") as pool:
        one_after_another(pool, 8)
        with pytest.raises(OutOfMemoryError):
            pool.allocate(100 * MIB)
        one_after_another(pool, 60)
    assert device.reserved == 0


@pytest.mark.parametrize("seed", range(8))
def test_random_programs_keep_all_promises(seed: int) -> None:
    """On three streams, with work of random length, checked after each step; it reserves less than without."""
    peaks = []
    for takes_back in (True, False):
        device = Simulated(4096 * MIB)
        streams = [device.create_stream() for _ in range(3)]
        draw = random.Random(seed)
        live: list[Buffer] = []
        with opened(device, small_limit=MIB, adaptive=False) as pool:
            core = pool._opened.core
            core.scheduler.configure(core.time, **pool._opened._settings(), take_back=takes_back)
            for step in range(300):
                stream = draw.choice(streams)
                top = 2 + 40 * (step // 75)
                buffer = pool.allocate(draw.randrange(1, top * MIB), stream=stream)
                stream.launch(draw.random() * 1e-3, writes=[buffer])
                live.append(buffer)
                while len(live) > draw.randrange(1, 8):
                    live.pop(draw.randrange(len(live))).free()
                pool.check()
            peaks.append(pool.stats().peak_reserved)
            for buffer in live:
                buffer.free()
        assert device.reserved == 0
    assert peaks[0] <= peaks[1]
