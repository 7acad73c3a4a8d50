"""A pool on a ROCm device by its name: awaited requests, memory that moves under addresses, and copies."""

import numpy as np
import pytest

from asyncmem import AsyncMemoryPool
from tests.cuda.fake import FakeDriver
from tests.cuda.leftovers import check_nothing_left

MIB = 1 << 20


@pytest.mark.asyncio
async def test_a_pool_opens_by_name_and_copies(driver: FakeDriver | None) -> None:
    """Both ways are awaited, and what comes back is what was sent."""
    before = {} if driver is None else driver.live()
    async with AsyncMemoryPool("rocm:0", limit=32 * MIB, segment_size=8 * MIB, min_free=0) as pool:
        sent = np.arange(MIB, dtype=np.float32)
        back = np.empty_like(sent)
        async with await pool.allocate_async(sent.nbytes) as buffer:
            array = buffer.view("float32")
            await array.copy_from(sent)
            await array.copy_to(back)
        assert (back == sent).all()
    del pool, buffer, array
    check_nothing_left(driver, before)


@pytest.mark.asyncio
async def test_memory_moves_under_addresses(driver: FakeDriver | None) -> None:
    """With pages, holes between blocks hold up no request that the sum of them would serve."""
    before = {} if driver is None else driver.live()
    async with AsyncMemoryPool("rocm:0", limit=32 * MIB, segments="paged", min_free=0) as pool:
        held = [await pool.allocate_async(4 * MIB) for _ in range(8)]
        for buffer in held[::2]:
            buffer.free()
        whole = await pool.allocate_async(16 * MIB, timeout=30)
        pool.check()
        for buffer in [*held[1::2], whole]:
            buffer.free()
    del pool, held, buffer, whole
    check_nothing_left(driver, before)
