"""Opening, waiting, draining and resizing: a pool's life in order."""

import gc
import subprocess
import sys
import threading
import warnings

import anyio
import anyio.to_thread
import pytest

from asyncmem import AsyncMemoryPool, InvalidRequest, OutOfMemoryError, PoolTimeout, Pressure
from tests.conservation import refillable, whole

from .loops import Run
from .support import LIMIT, MIB, make_pool, quick_device, stepped_pool, turns


def test_constructor_touches_neither_loop_nor_device() -> None:
    """A pool can be made anywhere, as a module's global too, and costs no driver call."""
    device = quick_device()
    before = device.driver_calls
    pool = make_pool(device=device)
    assert device.driver_calls == before
    assert "not open" in repr(pool)


ENDS = """
from asyncmem import AsyncMemoryPool
pool = AsyncMemoryPool("simulated", limit="8 MiB")
held = pool.allocate("1 MiB")
pool._opened.worker.close()
"""


def test_process_ends_with_a_pool_open() -> None:
    """Whoever exits without closing waits for nothing, also where the worker is gone already."""
    done = subprocess.run([sys.executable, "-c", ENDS], capture_output=True, text=True, check=False, timeout=100)
    assert (done.returncode, done.stderr) == (0, "")


def test_first_request_opens_the_pool(virtually: Run) -> None:
    """A pool that nobody opened opens itself when it is used."""

    async def main() -> None:
        pool = stepped_pool()
        async with pool.allocate_async(MIB) as buffer:
            assert buffer.nbytes == MIB
        await pool.aclose()

    virtually(main)


def test_wait_returns_once_the_pool_has_grown_ahead(virtually: Run) -> None:
    """open(wait=True), or wait(), comes back when pregrow is reserved."""

    async def main() -> None:
        async with stepped_pool(pregrow=4 * MIB, segment_size=2 * MIB) as pool:
            await pool.wait()
            assert pool.stats().reserved_bytes >= 4 * MIB
        waited = stepped_pool(pregrow=4 * MIB, segment_size=2 * MIB)
        await waited.open(wait=True)
        assert waited.stats().reserved_bytes >= 4 * MIB
        await waited.aclose()

    virtually(main)


def test_warmup_makes_the_first_requests_hits(virtually: Run) -> None:
    """After warmup, requests of the sizes named find memory ready."""

    async def main() -> None:
        async with stepped_pool() as pool:
            await pool.warmup([(MIB, 4)])
            before = pool.stats()
            for buffer in [await pool.allocate_async(MIB) for _ in range(4)]:
                buffer.free()
            after = pool.stats()
            assert after.num_cache_misses == before.num_cache_misses
            assert after.grows == before.grows

    virtually(main)


def test_trim_gives_back_what_is_free(virtually: Run) -> None:
    """trim() returns wholly free segments to the device, keep= leaves some."""

    async def main() -> None:
        async with stepped_pool(segment_size=2 * MIB) as pool:
            for buffer in [await pool.allocate_async(2 * MIB) for _ in range(4)]:
                buffer.free()
            await pool.trim(keep=4 * MIB)
            assert pool.stats().reserved_bytes == 4 * MIB
            await pool.trim()
            assert pool.stats().reserved_bytes == 0
            await refillable(pool, LIMIT)

    virtually(main)


def test_larger_limit_serves_who_waits(virtually: Run) -> None:
    """resize() to a larger limit wakes waiters that now fit."""

    async def main() -> None:
        async with stepped_pool(device=quick_device(4 * LIMIT)) as pool, pool.allocate_async(LIMIT):
            request = pool.allocate_async(LIMIT)
            assert not request.done()
            pool.resize(limit=2 * LIMIT)
            (await request).free()
            assert pool.stats().limit == 2 * LIMIT

    virtually(main)


def test_a_budget_may_have_a_limit_of_nothing(virtually: Run) -> None:
    """resize() to zero refuses every request; the figures can still be read."""

    async def main() -> None:
        async with stepped_pool() as pool:
            budget = pool.budget("part", limit=MIB)
            held = await budget.allocate_async(MIB)
            budget.resize(limit=0)
            assert budget.stats().pressure is Pressure.CRITICAL
            held.free()
            assert budget.stats().limit == 0
            with pytest.raises(OutOfMemoryError):
                await budget.allocate_async(1)

    virtually(main)


def test_smaller_limit_refuses_who_can_no_longer_fit(virtually: Run) -> None:
    """resize() below what somebody waits for fails that request at once, instead of letting it wait for ever."""

    async def main() -> None:
        async with stepped_pool() as pool:
            held = await pool.allocate_async(2 * MIB)
            request = pool.allocate_async(8 * MIB)
            pool.resize(limit=4 * MIB)
            with anyio.fail_after(5), pytest.raises(OutOfMemoryError):
                await request
            held.free()
            await turns(5)
            pool.reset_peaks()  # what was reserved under the former limit
            whole(pool)

    virtually(main)


def test_smaller_limit_holds_once_memory_comes_back(virtually: Run) -> None:
    """After resize() to less than is reserved, the pool gives segments back until it is within its limit."""

    async def main() -> None:
        async with stepped_pool(segment_size=2 * MIB) as pool:
            buffers = [await pool.allocate_async(2 * MIB) for _ in range(4)]
            pool.resize(limit=4 * MIB)
            request = pool.allocate_async(2 * MIB)
            buffers[0].free()
            await turns(5)
            assert not request.done()
            for buffer in buffers[1:3]:
                buffer.free()
            (await request).free()
            await pool.trim()
            assert pool.stats().reserved_bytes <= 4 * MIB
            buffers.clear()

    virtually(main)


@pytest.mark.hazard("H9")
def test_request_that_can_never_fit_is_refused_at_once(virtually: Run) -> None:
    """More than the limit of the pool, or of the budget, raises at the await without queueing."""

    async def main() -> None:
        async with stepped_pool() as pool:
            small = pool.budget("small", limit=2 * MIB)
            for share, nbytes in ((pool, LIMIT + 1), (small, 3 * MIB)):
                with pytest.raises(OutOfMemoryError) as caught:
                    await share.allocate_async(nbytes)
                assert caught.value.asked == nbytes
                assert share.stats().waits == 0
                with pytest.raises(OutOfMemoryError):
                    share.allocate(nbytes)
            async with pool.lease(2 * MIB) as lease:
                with pytest.raises(OutOfMemoryError):
                    await lease.allocate_async(3 * MIB)
            whole(pool)

    virtually(main)


@pytest.mark.hazard("H9")
def test_device_that_has_less_than_the_limit_ends_in_an_error(virtually: Run) -> None:
    """When the device refuses what the limit would allow and nobody holds anything, the request fails."""

    async def main() -> None:
        async with stepped_pool(LIMIT, device=quick_device(4 * MIB), segment_size=2 * MIB) as pool:
            with pytest.raises(OutOfMemoryError):
                await pool.allocate_async(6 * MIB)
            await refillable(pool, 4 * MIB)

    virtually(main)


def test_allocate_blocks_no_loop(virtually: Run) -> None:
    """On a loop's thread the synchronous door takes no timeout, because it would block everybody."""

    async def main() -> None:
        async with stepped_pool() as pool:
            with pytest.raises(InvalidRequest):
                pool.allocate(MIB, timeout=1)
            pool.allocate(MIB).free()
            pool.allocate(MIB, timeout=0).free()

    virtually(main)


@pytest.mark.may_block
def test_allocate_waits_in_other_threads(everywhere: Run) -> None:
    """From a thread, allocate(timeout=) blocks that thread until memory is freed, or raises PoolTimeout."""

    async def main() -> None:
        async with make_pool() as pool:
            held = await pool.allocate_async(LIMIT)

            def take() -> int:
                with pytest.raises(PoolTimeout):
                    pool.allocate(MIB, timeout=0.001)
                timed_out.set()
                with pool.allocate(MIB, timeout=30) as buffer:
                    return buffer.nbytes

            sizes: list[int] = []
            timed_out = threading.Event()

            async def other() -> None:
                sizes.append(await anyio.to_thread.run_sync(take))

            async with anyio.create_task_group() as group:
                group.start_soon(other)
                await anyio.to_thread.run_sync(timed_out.wait, 30)
                while not pool.stats().waiting:
                    await turns()
                held.free()
            assert sizes == [MIB]
            whole(pool)

    everywhere(main)


def test_pool_that_is_dropped_open_ends_its_worker() -> None:
    """A pool that nobody closes warns at most; it leaves no thread behind."""
    before = set(threading.enumerate())
    pool: AsyncMemoryPool | None = make_pool()
    assert pool is not None
    pool.allocate(MIB).free()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pool = None
        for thread in set(threading.enumerate()) - before:
            for _ in range(600):  # the collector cannot have the pool while the worker is still at its first job
                gc.collect()
                thread.join(0.1)
                if not thread.is_alive():
                    break
            assert not thread.is_alive()


def test_several_pools_share_nothing(virtually: Run) -> None:
    """Two pools on one device have limits, queues and statistics of their own."""

    async def main() -> None:
        device = quick_device(4 * LIMIT)
        async with stepped_pool(device=device, name="a") as first, stepped_pool(device=device, name="b") as second:
            async with first.allocate_async(LIMIT):
                assert second.stats().allocated_bytes == 0
                async with second.allocate_async(LIMIT):
                    pass
            whole(first)
            whole(second)

    virtually(main)
