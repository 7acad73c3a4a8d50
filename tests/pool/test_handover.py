"""The compiled way of a wait: to queue, to sleep, to be handed what was just freed; and where it gives way."""

import asyncio
import gc
import sys
import threading
from collections.abc import Callable, Coroutine, Generator
from types import FrameType

import pytest

from asyncmem import AsyncMemoryPool, Buffer, RequestCancelled
from asyncmem.core import Request
from asyncmem.devices import Simulated

MIB = 1 << 20
LIMIT = 4 * MIB
SMALL = LIMIT // 32  # one of it changes no level of pressure


Test = Callable[[AsyncMemoryPool], Coroutine[object, object, None]]


def waiting_test(test: Test) -> Callable[[], None]:
    """Run a test on asyncio, with a pool that serves the running loop already; trio always goes the way in Python."""

    async def main() -> None:
        async with AsyncMemoryPool(Simulated("8 MiB"), limit=LIMIT) as pool:
            held = await pool.allocate_async(LIMIT)
            waiting = asyncio.create_task(take(pool))
            await asyncio.sleep(0)
            held.free()
            (await waiting).free()
            await test(pool)
            assert pool.stats().allocated_bytes == 0
            assert pool.stats().waiting == 0
            pool.check()

    def run() -> None:
        asyncio.run(main())

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


async def take(pool: AsyncMemoryPool) -> Buffer:
    """Wait for all the memory."""
    return await pool.allocate_async(LIMIT)


def wait_for_all(pool: AsyncMemoryPool) -> Request[Buffer]:
    """Ask for all the memory, which somebody has."""
    request = pool.allocate_async(LIMIT)
    assert isinstance(request, Request)
    return request


@waiting_test
async def test_a_wait_calls_no_python_of_ours(pool: AsyncMemoryPool) -> None:
    """From the call to the hand-over, every step of a plain wait is compiled: the bound on its cost rests on that."""
    ours: list[str] = []

    def watch(frame: FrameType, event: str, _: object) -> None:
        name = frame.f_code.co_filename
        if event == "call" and "asyncmem" in name and "tests" not in name:
            ours.append(frame.f_code.co_qualname)

    resident, held = await pool.allocate_async(LIMIT - SMALL), await pool.allocate_async(SMALL)
    got: list[Buffer] = []

    async def wait() -> None:
        got.append(await pool.allocate_async(SMALL))

    task = asyncio.create_task(wait())
    sys.setprofile(watch)
    try:
        await asyncio.sleep(0)
        held.free()
        await task
    finally:
        sys.setprofile(None)
    resident.free()
    got.pop().free()
    assert ours == []


def test_growth_is_sent_for_by_few_calls() -> None:
    """A growing request runs none of our Python on the loop's thread: the worker is handed what is to be done."""
    ours: list[str] = []

    def watch(frame: FrameType, event: str, _: object) -> None:
        name = frame.f_code.co_filename
        if event == "call" and "asyncmem" in name and "tests" not in name:
            ours.append(frame.f_code.co_qualname)

    async def main() -> None:
        async with AsyncMemoryPool(Simulated("64 MiB"), limit="64 MiB", segment_size=MIB) as pool:
            kept = [await pool.allocate_async(2 * MIB)]
            sys.setprofile(watch)
            try:
                request = pool.allocate_async(2 * MIB)
                asked = list(ours)
                _ = pool.options
            finally:
                sys.setprofile(None)
            assert len(ours) == 1, "it is seen what is called"
            assert asked == []
            kept.append(await request)
            assert (pool.stats().grows, pool.stats().num_cache_misses) == (2, 2)
            kept.clear()

    asyncio.run(main())


@pytest.mark.parametrize("plain", [True, False])
def test_the_next_in_line_is_served_from_what_the_first_one_leaves(plain: bool) -> None:
    """However much was free when the queue was looked at last, before anybody of these waited."""

    async def main() -> None:
        async with AsyncMemoryPool(Simulated("64 MiB"), limit="64 MiB", segment_size="64 MiB") as pool:
            resident, held = await pool.allocate_async(62 * MIB), await pool.allocate_async(2 * MIB)
            first = pool.allocate_async(MIB // 4) if plain else pool.allocate_batch([MIB // 4])
            second = pool.allocate_async(MIB, timeout=None if plain else 5)
            held.free()
            assert [first.done(), second.done()] == [True, True]
            for one in (first.result(), second.result(), resident):
                one.free()

    asyncio.run(main())


def test_growth_serves_all_whom_it_can() -> None:
    """One segment for the first who waits also serves others, those of a budget included."""

    async def main() -> None:
        async with AsyncMemoryPool(Simulated("64 MiB"), limit="64 MiB", segment_size=16 * MIB) as pool:
            first = await pool.allocate_async(MIB)  # the pool serves this loop from here on
            budget = pool.budget("b", limit=4 * MIB)
            held = await budget.allocate_async(4 * MIB)
            requests = [pool.allocate_async(14 * MIB), budget.allocate_async(2 * MIB), pool.allocate_async(13 * MIB)]
            held.free()
            for buffer in await asyncio.wait_for(asyncio.gather(*requests), 60):
                buffer.free()
            first.free()

    asyncio.run(main())


@waiting_test
async def test_a_wait_is_seen_and_counted(pool: AsyncMemoryPool) -> None:
    """The compiled way tells the tables and statistics what the other one does."""
    pool.reset_stats()
    held = await pool.allocate_async(LIMIT)
    waiting = asyncio.create_task(take(pool), name="the waiter")
    await asyncio.sleep(0.01)
    (info,) = pool.waiters()
    assert "the waiter" in info.owner
    assert (info.nbytes, pool.stats().waiting_bytes) == (LIMIT, LIMIT)
    assert info.age > 0
    held.free()
    (await waiting).free()
    stats = pool.stats()
    assert (stats.waits, stats.waiting) == (1, 0)
    assert stats.wait_seconds >= stats.longest_wait > 0


@waiting_test
async def test_cancelled_after_the_grant_gives_it_back(pool: AsyncMemoryPool) -> None:
    """The grant was booked before the wake-up; the next in line has it."""
    held = await pool.allocate_async(LIMIT)
    first, second = asyncio.create_task(take(pool)), asyncio.create_task(take(pool))
    await asyncio.sleep(0)
    held.free()
    first.cancel()
    (await second).free()
    assert first.cancelled()
    assert pool.stats().handed_back == 1


@waiting_test
async def test_two_tasks_await_one_request(pool: AsyncMemoryPool) -> None:
    """The second sleeper joins by the way in Python; one of them may leave, and both may get the buffer."""
    held = await pool.allocate_async(LIMIT)
    request = wait_for_all(pool)

    async def share() -> Buffer:
        return await request

    tasks = [asyncio.create_task(share()) for _ in range(3)]
    await asyncio.sleep(0)
    tasks[0].cancel()
    await asyncio.sleep(0)
    held.free()
    got = await asyncio.gather(*tasks[1:])
    assert got[0] is got[1] is request.result()
    got[0].free()


@waiting_test
async def test_cancelled_request_wakes_its_sleeper(pool: AsyncMemoryPool) -> None:
    """The awaiting task gets `RequestCancelled`."""
    held = await pool.allocate_async(LIMIT)
    request = wait_for_all(pool)

    async def share() -> Buffer:
        return await request

    task = asyncio.create_task(share())
    await asyncio.sleep(0)
    assert request.cancel()
    with pytest.raises(RequestCancelled):
        await task
    held.free()


@waiting_test
async def test_request_driven_as_a_coroutine(pool: AsyncMemoryPool) -> None:
    """A task may be made of the request itself."""
    held = await pool.allocate_async(LIMIT)
    task = asyncio.create_task(wait_for_all(pool))
    late = asyncio.create_task(wait_for_all(pool))
    await asyncio.sleep(0)
    late.cancel()
    held.free()
    (await task).free()
    await asyncio.wait([late])
    assert late.cancelled()


@waiting_test
async def test_freed_by_another_thread(pool: AsyncMemoryPool) -> None:
    """The task is woken on its own loop's thread."""
    held = await pool.allocate_async(LIMIT)
    waiting = asyncio.create_task(take(pool))
    await asyncio.sleep(0)
    thread = threading.Thread(target=held.free)
    thread.start()
    (await asyncio.wait_for(waiting, 60)).free()
    thread.join()


def step(request: Request[Buffer]) -> Generator[object, object, Buffer]:
    """Await a request by hand as far as its sleep."""
    driven = request.__await__()
    assert isinstance(driven.send(None), asyncio.Future)
    return driven


@waiting_test
async def test_sleep_that_is_dropped_gives_its_place_back(pool: AsyncMemoryPool) -> None:
    """Whoever drives an await by hand and lets go of it leaves no place in the queue behind, nor a wake-up."""
    held = await pool.allocate_async(LIMIT)
    driven = step(wait_for_all(pool))
    assert pool.stats().waiting == 1
    del driven
    gc.collect()
    assert pool.stats().waiting == 0
    held.free()


@waiting_test
async def test_sleep_that_is_closed_or_thrown_into_withdraws(pool: AsyncMemoryPool) -> None:
    """As a generator would."""
    held = await pool.allocate_async(LIMIT)
    driven = step(wait_for_all(pool))
    driven.close()
    assert pool.stats().waiting == 0
    driven = step(wait_for_all(pool))
    with pytest.raises(ZeroDivisionError, match="thrown"):
        driven.throw(ZeroDivisionError("thrown"))
    assert pool.stats().waiting == 0
    with pytest.raises(StopIteration):
        driven.send(None)
    held.free()


@waiting_test
async def test_sleep_that_is_resumed_too_early_withdraws(pool: AsyncMemoryPool) -> None:
    """Only the future may resume it, as with a future that is awaited itself."""
    held = await pool.allocate_async(LIMIT)
    driven = step(wait_for_all(pool))
    with pytest.raises(RuntimeError, match="await wasn't used with future"):
        driven.send(None)
    assert pool.stats().waiting == 0
    held.free()


@waiting_test
async def test_request_in_a_cycle_gives_its_place_back(pool: AsyncMemoryPool) -> None:
    """The collector finds it, asleep or not."""
    held = await pool.allocate_async(LIMIT)
    cycle: list[object] = [wait_for_all(pool)]
    cycle.append(cycle)
    other: list[object] = [step(wait_for_all(pool))]
    other.append(other)
    assert pool.stats().waiting == 2
    del cycle, other
    gc.collect()
    assert pool.stats().waiting == 0
    held.free()
