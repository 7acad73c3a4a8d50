"""A synchronous call does not fail while memory is on its way to somebody who asked before it."""

import asyncio
import threading

import pytest

from asyncmem import AsyncMemoryPool
from asyncmem.devices import Latencies, Simulated

MIB = 1 << 20


def slow() -> Simulated:
    return Simulated("8 GiB", clock="wall", latencies=Latencies.blocking(0.05))


@pytest.mark.asyncio
async def test_a_thread_behind_a_growing_request_waits_for_that_growth() -> None:
    """The large request is being provided for: the small one behind it has its turn next, and is not out of memory."""
    async with AsyncMemoryPool(slow(), limit="8 GiB", segment_size="64 MiB") as pool:
        large = asyncio.ensure_future(pool.allocate_async("2 GiB"))
        await asyncio.sleep(0)
        small = await asyncio.to_thread(pool.allocate, 100 * MIB)
        assert small.nbytes == 100 * MIB
        (await large).free()
        small.free()


@pytest.mark.asyncio
async def test_a_thread_behind_a_growing_request_is_served_from_what_is_cached() -> None:
    """It does not stand by while caches hold what it needs, in blocks of other sizes."""
    async with AsyncMemoryPool(slow(), limit="8 GiB", segment_size="64 MiB") as pool:
        pieces = [await pool.allocate_async(16 * MIB) for _ in range(4)]
        pieces.clear()
        assert pool._core.counts().cached == 64 * MIB
        large = asyncio.ensure_future(pool.allocate_async("2 GiB"))
        await asyncio.sleep(0)
        (await asyncio.to_thread(pool.allocate, 64 * MIB)).free()
        assert not large.done()
        (await large).free()


def test_threads_that_grow_at_the_same_time_are_all_served() -> None:
    """Each carries out its own growth, and whoever stands behind another waits for it to end."""
    with AsyncMemoryPool(slow(), limit="8 GiB", segment_size="64 MiB") as pool:
        sizes = [(100 + 10 * number) * MIB for number in range(8)]
        served: list[int] = []

        def ask(nbytes: int) -> None:
            with pool.allocate(nbytes) as buffer:
                served.append(buffer.nbytes)

        threads = [threading.Thread(target=ask, args=(nbytes,)) for nbytes in sizes]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(served) == sizes


def test_a_call_without_a_deadline_waits_for_what_goes_back_to_the_device() -> None:
    """Without caching the room of a freed buffer is there once the worker has given it back: that is no shortage."""
    with AsyncMemoryPool(slow(), limit=12 * MIB, segments="direct") as pool:
        for _ in range(4):
            pool.allocate(8 * MIB).free()
