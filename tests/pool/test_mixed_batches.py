"""A batch of small and large buffers gets what it needs, and no more."""

import asyncio

import pytest

from asyncmem import AsyncMemoryPool
from asyncmem.devices import Simulated

KIB, MIB = 1 << 10, 1 << 20
SIZES = [4 * KIB, 600 * KIB, 2 * MIB]


@pytest.mark.parametrize("budgeted", [False, True])
def test_one_growth_is_enough(budgeted: bool) -> None:
    """Its own segment holds both; memory for one class only would be grown again and again, up to the limit."""
    asyncio.run(grow(budgeted))


async def grow(budgeted: bool) -> None:
    async with AsyncMemoryPool(Simulated("1 GiB"), limit="512 MiB") as pool:
        if budgeted:
            pool.budget("part", limit="8 MiB")
        small = [await pool.allocate_async(900 * KIB) for _ in range(8)]
        large = [await pool.allocate_async(63 * MIB)]
        before = pool.stats().grows
        held = [await pool.allocate_batch(SIZES) for _ in range(4)]
        assert pool.stats().grows - before <= len(held)
        assert pool.stats().reserved_bytes <= 256 * MIB
        pool.check()
        del small, large, held
