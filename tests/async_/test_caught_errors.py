"""An error that was caught keeps no memory of the frames that it came through, whether or not garbage is collected."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable, Callable, Iterator

import pytest

from asyncmem import AsyncMemoryPool, DeadlockError, OutOfMemoryError, PoolTimeout

HALF = 8 << 20


@pytest.fixture(autouse=True)
def no_garbage_is_collected() -> Iterator[None]:
    """What is freed is freed by its last reference."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


async def fill(pool: AsyncMemoryPool) -> list[object]:
    """Take all that there may be."""
    return [await pool.allocate_async(HALF), await pool.allocate_async(HALF)]


async def awaited_timeout(pool: AsyncMemoryPool) -> None:
    held = await fill(pool)
    try:
        await pool.allocate_async(512, timeout=0.01)
    except PoolTimeout:
        assert held


async def batch_timeout(pool: AsyncMemoryPool) -> None:
    held = await fill(pool)
    try:
        await pool.allocate_batch([512, 512], timeout=0.01)
    except PoolTimeout:
        assert held


async def awaited_out_of_memory(pool: AsyncMemoryPool) -> None:
    held = await fill(pool)
    try:
        await pool.allocate_async(8 * HALF)
    except OutOfMemoryError:
        assert held


async def synchronous_out_of_memory(pool: AsyncMemoryPool) -> None:
    held = await fill(pool)
    try:
        pool.allocate(512)
    except OutOfMemoryError:
        assert held


async def synchronous_timeout(pool: AsyncMemoryPool) -> None:
    def work() -> None:
        held = [pool.allocate(HALF), pool.allocate(HALF)]
        try:
            pool.allocate(512, timeout=0.01)
        except PoolTimeout:
            assert held

    await asyncio.to_thread(work)


async def lease_timeout(pool: AsyncMemoryPool) -> None:
    held = await fill(pool)
    try:
        async with pool.lease(HALF, timeout=0.01):
            pytest.fail("there was memory")
    except PoolTimeout:
        assert held


async def inside_of_a_lease(pool: AsyncMemoryPool) -> None:
    async with pool.lease(2 * HALF) as lease:
        held = [lease.allocate(HALF), lease.allocate(HALF)]
        try:
            await lease.allocate_async(512, timeout=0.01)
        except (PoolTimeout, OutOfMemoryError):
            assert held


async def deadlock(pool: AsyncMemoryPool) -> None:
    async with pool.allocate_async(HALF) as first, pool.allocate_async(HALF) as second:
        try:
            await pool.allocate_async(512)
        except DeadlockError:
            assert first.alive
            assert second.alive


async def a_request_that_is_kept(pool: AsyncMemoryPool) -> None:
    held = await fill(pool)
    request = pool.allocate_async(512, timeout=0.01)
    for _ in range(2):
        try:
            await request
        except PoolTimeout:
            assert held
    del held
    assert pool.stats().allocated_bytes == 0
    assert isinstance(request.exception(), PoolTimeout)


@pytest.mark.parametrize(
    "work",
    [
        awaited_timeout,
        batch_timeout,
        awaited_out_of_memory,
        synchronous_out_of_memory,
        synchronous_timeout,
        lease_timeout,
        inside_of_a_lease,
        deadlock,
        a_request_that_is_kept,
    ],
)
def test_a_caught_error_keeps_no_memory(work: Callable[[AsyncMemoryPool], Awaitable[None]]) -> None:
    """The next request is served."""

    async def main() -> None:
        async with AsyncMemoryPool("host", limit=2 * HALF, segment_size=2 * HALF, stall_after=None) as pool:
            await work(pool)
            assert pool.stats().allocated_bytes == 0
            (await pool.allocate_async(2 * HALF, timeout=5)).free()

    asyncio.run(main())
