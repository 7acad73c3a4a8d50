"""Opening a pool on a GPU by its name: the loop goes on meanwhile, and a try that comes to nothing leaves nothing."""

import asyncio
import threading
import time

import pytest
import trio

from asyncmem import AsyncMemoryPool, BackendUnavailable, InvalidRequest, PoolClosed
from asyncmem.devices import Cuda

from .fake import FakeDriver
from .leftovers import check_nothing_left

pytestmark = [pytest.mark.fake_only, pytest.mark.usefixtures("slow")]

MIB = 1 << 20
START = "cuDevicePrimaryCtxRetain"
LONG = 200_000_000  # ns


@pytest.fixture
def slow(spotless: FakeDriver) -> FakeDriver:
    """Let a context take a fifth of a second; afterwards nothing is left."""
    spotless.latency(START, LONG)
    return spotless


def make_pool(name: str = "cuda:0", **options: object) -> AsyncMemoryPool:
    return AsyncMemoryPool(name, limit=16 * MIB, segment_size=4 * MIB, **options)  # type: ignore[arg-type]  # any


def let_the_thread_end() -> None:
    """Wait without a step of the loop until the devices are there."""
    for thread in threading.enumerate():
        if thread.name.endswith("opens"):
            thread.join()


@pytest.mark.asyncio
async def test_the_loop_goes_on_while_a_gpu_is_made(slow: FakeDriver) -> None:
    """A ticking task is not held up by the driver, and the pool serves once it is open."""
    seconds, ticks = 1.0, 0
    slow.latency(START, int(seconds * 1e9))

    async def tick() -> None:
        nonlocal ticks
        while True:
            await asyncio.sleep(0)
            ticks += 1

    ticker = asyncio.ensure_future(tick())
    await asyncio.sleep(0)
    before = time.perf_counter()
    async with make_pool() as pool:
        assert time.perf_counter() - before >= seconds
        assert isinstance(pool.device, Cuda)
        assert ticks > 100  # a loop that is held up has a few at its beginning and its end
        (await pool.allocate_async(MIB)).free()
        ticker.cancel()


@pytest.mark.anyio
async def test_trio_goes_on_too() -> None:
    """And a cancelled opening is forgotten there as well."""
    pool = make_pool()
    with trio.move_on_after(0.01) as scope:
        await pool.open()
    assert scope.cancelled_caught
    assert "not open" in repr(pool)
    async with pool:
        (await pool.allocate_async(MIB)).free()


@pytest.mark.asyncio
async def test_a_cancelled_opening_leaves_a_pool_that_is_not_open(slow: FakeDriver) -> None:
    """What its thread makes meanwhile is closed, and the pool may be opened again."""
    before = slow.live()
    pool = make_pool()
    task = asyncio.ensure_future(pool.open())
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()
    assert "not open" in repr(pool)
    let_the_thread_end()
    check_nothing_left(slow, before)
    async with pool:
        assert slow.live()


@pytest.mark.asyncio
async def test_a_cancellation_beside_the_news_leaves_nothing_either() -> None:
    """The device is there and its news on the way when the task is cancelled."""
    pool = make_pool()
    task = asyncio.ensure_future(pool.open())
    await asyncio.sleep(0)
    let_the_thread_end()
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()
    assert "not open" in repr(pool)


@pytest.mark.asyncio
async def test_tasks_that_open_together_share_one_device(slow: FakeDriver) -> None:
    """One of them may be cancelled: the others get it all the same."""
    pool = make_pool()
    tasks = [asyncio.ensure_future(pool.open()) for _ in range(3)]
    await asyncio.sleep(0)
    tasks[0].cancel()
    done, _ = await asyncio.wait(tasks)
    assert sorted(task.cancelled() for task in done) == [False, False, True]
    assert slow.counts()[START] == 1
    await pool.aclose()


@pytest.mark.asyncio
async def test_a_pool_that_is_closed_meanwhile_stays_closed() -> None:
    """Whoever opens it hears that, and the device goes."""
    pool = make_pool()
    task = asyncio.ensure_future(pool.open())
    await asyncio.sleep(0)
    await pool.aclose()
    with pytest.raises(PoolClosed):
        await task


@pytest.mark.asyncio
async def test_a_thread_that_is_faster_is_joined() -> None:
    """A synchronous use makes the device by itself; one of the two is used, and the other closed."""
    pool = make_pool()
    task = asyncio.ensure_future(pool.open())
    await asyncio.sleep(0)
    await asyncio.to_thread(lambda: pool.allocate(MIB).free())
    await task
    (await pool.allocate_async(MIB)).free()
    await pool.aclose()


@pytest.mark.asyncio
async def test_what_cannot_be_opened_says_so_at_the_await() -> None:
    """A device that is not there, one that has no such segments, a peer that is not there: the pool is not open."""
    for pool, error in (
        (make_pool("cuda:7"), BackendUnavailable),
        (make_pool(segments="weird"), InvalidRequest),
        (make_pool(peers=["cuda:7"]), BackendUnavailable),
    ):
        for _ in range(2):
            with pytest.raises(error):
                await pool.open()
        with pytest.raises(error):
            await asyncio.to_thread(pool.__enter__)
        assert "not open" in repr(pool)


def test_synchronous_code_opens_on_its_own_thread() -> None:
    """No thread is started for it but the worker."""
    with make_pool() as pool:
        assert not any(thread.name.endswith("opens") for thread in threading.enumerate())
        pool.allocate(MIB).free()
