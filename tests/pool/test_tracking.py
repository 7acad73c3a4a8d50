"""Tracking blames who forgets a buffer, and nobody else."""

import asyncio

import pytest

from asyncmem import AsyncMemoryPool
from asyncmem.devices import Simulated


@pytest.mark.asyncio
async def test_a_grant_that_is_given_back_is_nobodys_leak() -> None:
    """A request that is cancelled after its grant gives the memory back, and no warning calls that forgotten."""
    async with AsyncMemoryPool(Simulated(), limit="1 MiB", track=True) as pool:
        held = await pool.allocate_async("1 MiB")

        async def wait() -> None:
            await pool.allocate_async("1 MiB")

        waiting = asyncio.create_task(wait())
        await asyncio.sleep(0)
        assert pool.stats().waiting == 1
        held.free()  # grants it
        waiting.cancel()  # before it could take it
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert pool.stats().handed_back == 1
        assert pool.stats().allocated_bytes == 0


@pytest.mark.asyncio
async def test_the_inside_of_a_lease_is_served_where_the_pool_is_full() -> None:
    """What is allocated there goes the way that notes it, on which all of the pool's memory counts as taken."""
    async with (
        AsyncMemoryPool(Simulated(), limit="1 MiB", segment_size="1 MiB", track=True) as pool,
        pool.lease("1 MiB") as lease,
        lease.allocate_async("512 KiB") as buffer,
    ):
        assert buffer.nbytes == 512 << 10
