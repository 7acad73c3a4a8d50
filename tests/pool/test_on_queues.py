"""Pools on drivers that give out more than is good: the pool's own bounds have to hold.

OpenCL on a processor refuses nobody anything, and Metal little.
"""

from __future__ import annotations

import asyncio
import random

import numpy as np
import pytest

from asyncmem import AsyncMemoryPool, Buffer, OutOfMemoryError
from asyncmem.devices import Metal, OpenCL
from asyncmem.pipeline import Pipeline, StageShare
from tests.conservation import whole

MIB = 1 << 20
LIMIT = 256 * MIB

pytestmark = pytest.mark.asyncio


@pytest.fixture(params=["opencl", "metal"])
def device(request: pytest.FixtureRequest) -> OpenCL | Metal:
    found: OpenCL | Metal = request.getfixturevalue(request.param)
    return found


def taken(device: OpenCL | Metal) -> int:
    """Return what this process has of the device's memory."""
    return device.physical.memory.taken if isinstance(device, OpenCL) else device.mtl_device.currentAllocatedSize()


async def test_64_tasks_share_a_limit_and_leave_nothing(device: OpenCL | Metal) -> None:
    """Together they want several times the limit, on eight streams; each finds its own bytes, and all of them end."""
    streams = [device.create_stream() for _ in range(8)]
    before = taken(device)

    async def work(number: int) -> None:
        choice = random.Random(number)
        for turn in range(4):
            size, stream = choice.randrange(1, 24) * MIB, streams[number % 8]
            with await pool.allocate_async(size, stream=stream) as buffer:
                mark, back = (number * 4 + turn) % 251, np.zeros(2, np.uint8)
                device.fill(buffer.address, size, mark, stream)
                await asyncio.sleep(0)
                device.copy_out(memoryview(back)[:1], buffer.address, stream)
                device.copy_out(memoryview(back)[1:], buffer.address + size - 1, stream)
                await stream.synchronize()
                assert list(back) == [mark, mark]

    async with AsyncMemoryPool(device, limit=LIMIT) as pool:
        await asyncio.gather(*(work(number) for number in range(64)))
        stats = pool.stats()
        assert stats.allocated_bytes == 0
        assert stats.waits > 0
        assert LIMIT // 2 < stats.peak_reserved <= LIMIT
        whole(pool)
    assert taken(device) == before


async def test_more_than_the_limit_is_refused(device: OpenCL | Metal) -> None:
    """Though the driver would give it."""
    async with AsyncMemoryPool(device, limit=LIMIT) as pool:
        with pytest.raises(OutOfMemoryError):
            await pool.allocate_async(LIMIT + 1)
        with await pool.allocate_async(LIMIT - 8 * MIB):
            assert pool.try_allocate(16 * MIB) is None
        whole(pool)


async def test_a_pipeline_waits_for_memory_and_keeps_its_order(device: OpenCL | Metal) -> None:
    """Items of a stage want a third of the limit each."""

    async def make(number: int, share: StageShare) -> Buffer:
        buffer = await share.allocate_async(LIMIT // 3)
        device.fill(buffer.address, 4, number, buffer.stream)
        return buffer

    async def read(buffer: Buffer, share: StageShare) -> int:
        back = np.zeros(4, np.uint8)
        async with share.allocate_async(MIB):
            device.copy_out(back.data, buffer.address, buffer.stream)
            await buffer.stream.synchronize()
        buffer.free()
        return int(back.max())

    async with AsyncMemoryPool(device, limit=LIMIT) as pool:
        async with Pipeline(make, read, pool=pool) as pipe:
            assert [value async for value in pipe.map(range(12))] == list(range(12))
        assert pool.stats().peak_allocated <= LIMIT
        whole(pool)
