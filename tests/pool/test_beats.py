"""What the worker does by the clock for pools whose memory comes by pages."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from asyncmem import AsyncMemoryPool
from asyncmem.devices import Latencies, Simulated
from asyncmem.testing import SteppedPool

from .support import MIB

KIB = 1 << 10
pytestmark = pytest.mark.may_block  # the worker's calls are steps of the loop


@contextmanager
def opened(device: Simulated) -> Iterator[AsyncMemoryPool]:
    with SteppedPool(device, limit=32 * MIB, segments="paged", stall_after=None, min_free=0, overlap=0) as pool:
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
