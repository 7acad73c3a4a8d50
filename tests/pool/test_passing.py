"""Hits pass a request that waits for growth which is under way for it, within the bypass budget."""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator

import pytest

from asyncmem import AsyncMemoryPool, Buffer, OutOfMemoryError
from asyncmem.core import Ready
from asyncmem.devices import Latencies, Segment, Simulated, Stream
from asyncmem.facts import OutOfMemoryFacts
from asyncmem.pool.flow import Flow
from asyncmem.pool.waiting import Waiting

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
        assert self.go_on.wait(10)
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


def passes(pool: AsyncMemoryPool, nbytes: int = MIB) -> bool:
    """Say whether a hit is served by the door itself; what it serves is freed at once."""
    request = pool.allocate_async(nbytes)
    served = isinstance(request, Ready)
    if served:
        request.result().free()
    else:
        request.cancel()
    return served


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
        assert (pool.stats().grows, pool.stats().waits) == (2, 2)  # with those of the memory that was there


async def test_hits_pass_while_a_thread_grows_by_itself() -> None:
    """Who grows for a synchronous call keeps nobody from what is there."""
    device = SlowDriver()
    async with AsyncMemoryPool(device, limit=LIMIT, segment_size=8 * MIB) as pool:
        (await pool.allocate_async(MIB)).free()
        device.entered.clear()
        device.go_on.clear()
        large = asyncio.ensure_future(asyncio.to_thread(pool.allocate, LARGE))
        await device.asked()
        assert passes(pool)
        device.go_on.set()
        (await large).free()
        assert pool.stats().grows == 2


async def test_no_more_bytes_pass_than_the_bypass_budget() -> None:
    """Hits count as overtaking: once the budget is spent, newcomers queue behind."""
    async with growing(bypass=0.25) as (pool, _, _):
        assert [passes(pool, 4 * MIB) for _ in range(6)] == [True] * 4 + [False] * 2
        late = pool.allocate_async(MIB)
        assert not late.done()
        late.cancel()


async def test_who_passes_before_the_worker_has_decided_counts_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    """The doors stand ajar from the moment that growth was sent for; what went by until then is not to be had twice."""
    decides = threading.Event()
    decide = Flow._decide_and_grow

    def decide_late(flow: Flow, waiting: Waiting) -> None:
        assert decides.wait(10)
        decide(flow, waiting)

    device = SlowDriver()
    async with AsyncMemoryPool(
        device, limit=LIMIT, segment_size=8 * MIB, bypass=2 * MIB / LIMIT, stall_after=None
    ) as pool:
        room = [await pool.allocate_async(MIB) for _ in range(8)]
        room.clear()
        monkeypatch.setattr(Flow, "_decide_and_grow", decide_late)
        device.entered.clear()
        device.go_on.clear()
        large = asyncio.ensure_future(pool.allocate_async(LARGE))
        await asyncio.sleep(0)
        try:
            passed = [await pool.allocate_async(MIB) for _ in range(2)]
            decides.set()
            await device.asked()
            another = asyncio.ensure_future(pool.allocate_async(MIB))
            await asyncio.sleep(0.01)
            assert not another.done()
        finally:
            decides.set()
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


async def test_with_two_who_wait_nobody_passes() -> None:
    """The second one is served by what is freed, so newcomers stand behind it."""
    async with growing() as (pool, _, _):
        second = pool.allocate_async(16 * MIB)
        assert not passes(pool)
        second.cancel()
        assert passes(pool)


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
    signals: list[int] = []

    class Watched(AsyncMemoryPool):
        def _signal(self, flags: int) -> None:
            signals.append(flags)
            super()._signal(flags)

    device = SlowDriver()
    async with Watched(device, limit=LIMIT, segment_size=8 * MIB) as pool:
        apart = [await pool.allocate_async(8 * MIB) for _ in range(2)]
        device.entered.clear()
        device.go_on.clear()
        waiting = asyncio.ensure_future(pool.allocate_async(16 * MIB))
        await device.asked()
        apart.clear()
        assert signals == []
        device.go_on.set()
        (await waiting).free()


async def test_what_a_budget_has_promised_is_not_used_up() -> None:
    """A waiter from a budget has the room in it promised only: whoever came later stands behind, as before."""
    async with growing(share="all of it") as (pool, device, large):
        assert not passes(pool)
        device.go_on.set()
        (await large).free()


async def test_many_who_hit_do_not_take_what_comes() -> None:
    """With threads at every door the request is served by the growth that was for it, and no second one is needed."""
    async with growing(bypass=1000.0) as (pool, device, large):
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
