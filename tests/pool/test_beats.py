"""What the worker does by the clock for pools whose memory comes by pages."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from asyncmem import AsyncMemoryPool, DeviceError
from asyncmem.devices import Latencies, Simulated
from asyncmem.testing import SteppedPool

from .support import MIB

KIB = 1 << 10
pytestmark = pytest.mark.may_block  # the worker's calls are steps of the loop


@contextmanager
def opened(device: Simulated, limit: int | None = 32 * MIB) -> Iterator[AsyncMemoryPool]:
    with SteppedPool(device, limit=limit, segments="paged", stall_after=None, min_free=0, overlap=0) as pool:
        yield pool
        pool.check()


def paged_device() -> Simulated:
    return Simulated(64 * MIB, latencies=Latencies.zero(), page=64 * KIB)


def test_what_lay_in_a_cache_has_its_fence_on_the_same_beat() -> None:
    """Or it would be known to be done a beat later than all else."""
    device = paged_device()
    stream = device.create_stream()
    with opened(device) as pool:
        core = pool._opened.core
        for _ in range(3):
            pool.allocate(2 * KIB, stream=stream).free()
        assert core.counts().cached == 2 * KIB
        stream.launch(1.0)
        pool.allocate(2 * KIB, stream=stream).free()
        pool._opened.beat()
        assert core.counts().cached == 0
        assert core.unfenced() == []
        assert pool._opened.retire.counts().open_fences == 1


def test_neighbours_are_joined_once_nothing_is_under_way() -> None:
    """Few frees are no reason to look at all blocks, until there is nothing else to wait for; then it is done once."""
    device = paged_device()
    streams = [device.create_stream() for _ in range(2)]
    with opened(device) as pool:
        core, beat = pool._opened.core, pool._opened.beat
        others = [pool.allocate(KIB) for _ in range(200)]
        pair = [pool.allocate(MIB + 64 * KIB, stream=stream) for stream in streams]
        end = pool.allocate(MIB)
        for buffer, stream in zip(pair, streams, strict=True):
            stream.launch(1.0, writes=[buffer])
            buffer.free()

        def largest() -> int:
            return max(block[1] for block in core.blocks() if block[2] == "free")

        beat()
        beat()
        assert largest() == MIB + 64 * KIB
        device.advance(2.0)
        beat()
        assert largest() == 2 * (MIB + 64 * KIB)
        for buffer in (*others, end):
            buffer.free()


@contextmanager
def moved(device: Simulated) -> Iterator[AsyncMemoryPool]:
    """Have memory mapped at two addresses, at the first of which the device is still at work."""
    with opened(device, limit=None) as pool:
        first, below = pool.allocate(8 * MIB), pool.allocate(MIB)
        device.default_stream.launch(1.0, writes=[first])
        first.free()
        with pool.allocate(12 * MIB), below:
            assert device.reserved == 13 * MIB
            yield pool


def test_what_cannot_be_unmapped_is_not_tried_again_on_each_beat() -> None:
    """It would fail, and be told of, some hundred times a second."""
    device = paged_device()
    with moved(device) as pool:
        core, carry_out = pool._opened.core, pool._opened.executor._ask_and_run
        device.run_until_idle()
        pool._opened.retire.poll()
        device.fail("unmap")
        now = core.time
        with pytest.raises(DeviceError):
            carry_out(lambda _: core.scheduler.end_beat(now))
        for turn in range(20):
            carry_out(lambda _, turn=turn: core.scheduler.end_beat(now + turn * 0.004))
        assert len(device.calls_of("unmap")) == 1
        carry_out(lambda _: core.scheduler.end_beat(core.time + 1))
        assert len(device.calls_of("unmap")) > 1
        assert not core.scheduler.gauges()["leaving"]


def test_no_worker_waits_for_addresses_to_be_free_while_nothing_goes_back() -> None:
    """What others need is memory, and requests need the worker."""
    device = paged_device()
    with moved(device) as pool:
        scheduler = pool._opened.core.scheduler
        scheduler.offer(pool._opened.core.time)
        assert scheduler.gauges()["under_way"] == 0
