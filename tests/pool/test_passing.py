"""Hits pass a request that waits for growth which is under way for it, within the bypass budget."""

import asyncio
import contextlib
import sys
import threading
from collections.abc import AsyncIterator

import pytest

from asyncmem import AsyncMemoryPool, Buffer, OutOfMemoryError
from asyncmem.devices import Latencies, Segment, Simulated, Stream
from asyncmem.facts import OutOfMemoryFacts

from .support import MIB

LIMIT = 64 * MIB
LARGE = 32 * MIB

pytestmark = pytest.mark.asyncio


class SlowDriver(Simulated):
    """A device that takes as long over a segment as a test wants, and then may refuse it."""

    def __init__(self) -> None:
        super().__init__(LIMIT, latencies=Latencies.zero())
        self.go_on = threading.Event()
        self.go_on.set()
        self.entered = threading.Event()
        self.refuses = False

    def allocate_segment(self, nbytes: int, kind: str = "auto", stream: Stream | None = None) -> Segment:
        self.entered.set()
        assert self.go_on.wait(60)
        if self.refuses:
            raise OutOfMemoryError(OutOfMemoryFacts(asked=nbytes, device=self.name))
        return super().allocate_segment(nbytes, kind, stream)

    async def asked(self) -> None:
        """Wait until somebody asks for a segment."""
        assert await asyncio.to_thread(self.entered.wait, 10)


@contextlib.asynccontextmanager
async def growing(
    bypass: float = 2.0, share: str | None = None
) -> AsyncIterator[tuple[AsyncMemoryPool, SlowDriver, "asyncio.Future[Buffer]"]]:
    """A pool with 8 MiB of mapped memory, of which 1 MiB is held, and a request for which it grows all the while."""
    device = SlowDriver()
    async with AsyncMemoryPool(device, limit=LIMIT, segment_size=8 * MIB, bypass=bypass, stall_after=None) as pool:
        held = await pool.allocate_async(MIB)
        device.entered.clear()
        device.go_on.clear()
        door = pool if share is None else pool.budget(share, limit=LARGE)
        large = asyncio.ensure_future(door.allocate_async(LARGE))
        try:
            await device.asked()
            yield pool, device, large
        finally:
            device.go_on.set()
            held.free()
            large.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                (await large).free()
        pool.check()


@contextlib.asynccontextmanager
async def quick_turns() -> AsyncIterator[None]:
    """Threads that never wait for anything let others run all the same, and often."""
    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        yield
    finally:
        sys.setswitchinterval(usual)


def passes(pool: AsyncMemoryPool, nbytes: int = MIB) -> bool:
    """Say whether a hit is served by the door itself; what it serves is freed at once."""
    turned_away = pool._core.counts().barred
    request = pool.allocate_async(nbytes)
    request.cancel() or request.result().free()
    return pool._core.counts().barred == turned_away


async def test_hits_pass_while_growth_is_under_way() -> None:
    """Every door serves them without a look at the queue, and the one who waits gets what comes."""
    async with growing() as (pool, device, large):
        turned_away = pool._core.counts().barred
        assert passes(pool)
        assert pool.try_allocate(MIB) is not None
        pool.allocate(MIB).free()
        (await asyncio.to_thread(pool.allocate, MIB)).free()
        (await pool.allocate_batch([MIB, MIB])).free()
        assert pool._core.counts().barred == turned_away
        assert not large.done()
        device.go_on.set()
        (await large).free()
        assert (pool.stats().grows, pool.stats().growth_waits) == (2, 2)  # with those of the memory that was there


async def test_hits_pass_while_a_thread_grows_by_itself() -> None:
    """Who grows for a synchronous call keeps nobody from what is there."""
    device = SlowDriver()
    async with AsyncMemoryPool(device, limit=LIMIT, segment_size=8 * MIB) as pool:
        held = await pool.allocate_async(MIB)
        device.entered.clear()
        device.go_on.clear()
        large = asyncio.ensure_future(asyncio.to_thread(pool.allocate, LARGE))
        await device.asked()
        assert passes(pool)
        device.go_on.set()
        (await large).free()
        held.free()
        assert pool.stats().grows == 2


async def test_no_more_bytes_pass_than_the_bypass_budget() -> None:
    """Hits count as overtaking: once the budget is spent, newcomers queue behind."""
    async with growing(bypass=0.25) as (pool, _, _):
        assert [passes(pool, 4 * MIB) for _ in range(6)] == [True] * 4 + [False] * 2
        late = pool.allocate_async(MIB)
        assert not late.done()
        late.cancel()


async def test_who_passes_before_the_worker_has_begun_counts_as_well() -> None:
    """The doors stand ajar from the moment that growth was sent for; what went by until then is not to be had twice."""
    begins = threading.Event()
    device = SlowDriver()
    async with AsyncMemoryPool(
        device, limit=LIMIT, segment_size=8 * MIB, bypass=2 * MIB / LIMIT, stall_after=None
    ) as pool:
        room = [await pool.allocate_async(MIB) for _ in range(8)]
        room.clear()
        pool._opened.worker.submit(lambda: begins.wait(60))
        device.entered.clear()
        device.go_on.clear()
        large = asyncio.ensure_future(pool.allocate_async(LARGE))
        await asyncio.sleep(0)
        try:
            passed = [await pool.allocate_async(MIB) for _ in range(2)]
            assert not device.entered.is_set()
            begins.set()
            await device.asked()
            another = asyncio.ensure_future(pool.allocate_async(MIB))
            await asyncio.sleep(0.01)
            assert not another.done()
        finally:
            begins.set()
            device.go_on.set()
        (await large).free()
        (await another).free()
        passed.clear()


async def test_what_passed_counts_also_where_the_growth_fails() -> None:
    """The one who waits on, now for others to free, has been overtaken by those bytes."""
    async with growing(bypass=0.25) as (pool, device, large):
        assert [passes(pool, 4 * MIB) for _ in range(3)] == [True] * 3
        device.refuses = True
        device.go_on.set()
        await pool.trim(LIMIT)  # on the worker, so behind the growth
        assert not large.done()
        assert not passes(pool)
        late = [pool.allocate_async(MIB * 3 // 2) for _ in range(3)]
        assert [one.done() for one in late] == [True, True, False]
        for one in late:
            one.cancel() or one.result().free()


async def test_what_passed_before_somebody_came_did_not_overtake_him() -> None:
    """The second one who waits may be passed by the whole budget, whatever passed the first one."""
    async with growing(bypass=0.25) as (pool, device, large):
        assert [passes(pool, 4 * MIB) for _ in range(3)] == [True] * 3
        second = pool.allocate_async(48 * MIB)
        device.go_on.set()
        kept = await large
        later = []
        for _ in range(5):
            request = pool.allocate_async(4 * MIB)
            later.append(request.done())
            request.cancel() or request.result().free()
        assert later == [True] * 4 + [False]
        second.cancel()
        kept.free()


async def test_behind_one_who_waits_for_others_nobody_passes() -> None:
    """What is freed serves that one first; only where memory is made for all who are here do newcomers pass."""
    async with growing() as (pool, _, _):
        second = pool.allocate_async(16 * MIB)
        assert passes(pool)
        third = pool.allocate_async(48 * MIB)
        assert not passes(pool)
        third.cancel()
        assert passes(pool)
        second.cancel()


async def test_a_free_that_is_enough_serves_without_waiting_for_the_growth() -> None:
    """Growth that takes long holds nobody up whom a free can help."""
    device = SlowDriver()
    async with AsyncMemoryPool(device, limit=LIMIT, segment_size=8 * MIB) as pool:
        held = await pool.allocate_async(8 * MIB)
        device.entered.clear()
        device.go_on.clear()
        waiting = pool.allocate_async(8 * MIB)
        await device.asked()
        held.free()
        assert waiting.done()
        waiting.result().free()
        device.go_on.set()


async def test_a_free_that_is_not_enough_has_nobody_looked_at() -> None:
    """What is under way serves the one who waits, so a free costs its caller no look at the whole queue."""
    device = SlowDriver()
    async with AsyncMemoryPool(device, limit=LIMIT, segment_size=8 * MIB) as pool:
        apart = [await pool.allocate_async(8 * MIB) for _ in range(2)]
        device.entered.clear()
        device.go_on.clear()
        waiting = asyncio.ensure_future(pool.allocate_async(20 * MIB))
        await device.asked()
        before = pool._opened.core.scheduler.gauges()["progress"]
        apart.clear()
        assert pool._opened.core.scheduler.gauges()["progress"] == before
        device.go_on.set()
        (await waiting).free()


async def test_what_a_budget_has_promised_is_not_used_up() -> None:
    """What grows for a budget has its room there already: hits pass in the pool, and none in the budget."""
    async with growing(share="all of it") as (pool, device, large):
        (budget,) = pool._opened.budgets
        assert passes(pool)
        assert budget.try_allocate(MIB) is None
        device.go_on.set()
        (await large).free()
        assert budget.try_allocate(MIB) is not None


async def test_many_who_hit_do_not_take_what_comes() -> None:
    """With threads at every door the request is served by the growth that was for it, and no second one is needed."""
    async with growing(bypass=1000.0) as (pool, device, large), quick_turns():
        ended, passed = threading.Event(), threading.Semaphore(0)

        def hit() -> None:
            while not ended.is_set():
                found = pool.try_allocate(7 * MIB)
                if found is not None:
                    found.free()
                    passed.release()

        threads = [threading.Thread(target=hit) for _ in range(3)]
        for thread in threads:
            thread.start()
        for _ in range(100):
            await asyncio.to_thread(passed.acquire)
        device.go_on.set()
        (await large).free()
        ended.set()
        for thread in threads:
            thread.join()
        assert pool.stats().grows == 2
