"""A batch of small and large buffers gets what it needs, and no more."""

import asyncio
import random

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


DRAW = random.Random(1)
OFTEN = {
    "both classes": [1 << 10 + i % 11 for i in range(100)],
    "random": [int(KIB * 1024 ** DRAW.random()) for _ in range(100)],
    "random, evenly": [DRAW.randrange(KIB, MIB) for _ in range(100)],
}


@pytest.mark.parametrize("sizes", OFTEN.values(), ids=OFTEN)
def test_a_batch_that_comes_again_is_served_by_caches(sizes: list[int]) -> None:
    """A hundred sizes, small and large: from the fourth time on nearly all have a cached block, and none misses."""

    async def repeat() -> None:
        async with AsyncMemoryPool("host", limit="1 GiB") as pool:
            for _ in range(4):
                await pool.allocate_batch(sizes)
            before = pool.stats()
            for _ in range(10):
                await pool.allocate_batch(sizes)
            after = pool.stats()
            assert after.hits_stream - before.hits_stream >= 0.9 * 1000
            assert after.num_cache_misses == before.num_cache_misses
            assert after.grows <= 3
            pool.check()

    asyncio.run(repeat())


@pytest.mark.parametrize("age", [0.0, 0.01])  # seconds: only a pool that has been open for a while exchanges memory
@pytest.mark.parametrize("segment_size", ["2 MiB", "4 MiB", "64 MiB"])
@pytest.mark.parametrize("limit", [3 * MIB, 4 * MIB, 5 * MIB, 9 * MIB, 40 * MIB])
def test_a_batch_that_fits_is_served_under_a_close_limit(limit: int, segment_size: str, age: float) -> None:
    """Where both classes cannot have segments of their own one holds all: nothing grows and goes back by turns."""
    draw = random.Random(limit)

    async def serve() -> None:
        for _ in range(40):
            async with AsyncMemoryPool("host", limit=limit, segment_size=segment_size) as pool:
                await asyncio.sleep(age)
                small = [draw.randrange(1, 512 * KIB) for _ in range(draw.randrange(1, 4))]
                room = limit - sum(small) - 512 * len(small)
                await pool.allocate_batch([*small, draw.randrange(min(MIB, room), room + 1)], timeout=20)
                assert pool.stats().driver_calls <= 4

    asyncio.run(serve())
