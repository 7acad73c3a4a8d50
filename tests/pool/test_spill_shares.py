"""Marked memory of a budget or a lease moves where only that is full, as any does where the pool is."""

from __future__ import annotations

import asyncio
import threading

import pytest

from asyncmem import AsyncMemoryPool, InvalidRequest, OutOfMemoryError, PoolClosed, PoolTimeout, Spillable
from asyncmem.insight import PlannedPlace
from asyncmem.pool import ReusePlan
from asyncmem.pool.share import Share
from tests.conservation import idle, whole

from .spilling import LIMIT, LONG, Marks, fill, holds, make_pool, run, stepped_pool, until
from .support import MIB, quick_device

pytestmark = pytest.mark.may_block  # memory to mark is asked for by plain calls

SMALL = 4 * MIB  # of what a budget or a lease has; the pool has twice as much


def marked(pool: AsyncMemoryPool, share: Share, count: int, nbytes: int = MIB) -> list[Spillable]:
    """Allocate some from a share, and mark them."""
    return [pool.spillable(share.allocate(nbytes)) for _ in range(count)]


def away(some: list[Spillable]) -> list[bool]:
    """Say which are on the host."""
    return [one.spilled for one in some]


def free(*some: list[Spillable]) -> None:
    """Free them all."""
    for group in some:
        for one in group:
            one.free()


def test_a_full_budget_sends_its_own_oldest_away() -> None:
    """As much as the request needs; what is older and elsewhere stays, because that would not help."""

    async def main() -> None:
        async with stepped_pool() as pool, Marks(pool):
            mine, other = pool.budget("mine", limit=SMALL), pool.budget("other", limit=SMALL)
            theirs, ours = marked(pool, other, 2), marked(pool, mine, 4)
            async with ours[0]:
                pass
            (await mine.allocate_async(2 * MIB)).free()
            assert away(ours) == [False, True, True, False]
            assert away(theirs) == [False, False]
            assert mine.stats().peak_allocated == SMALL
            free(ours, theirs)
            idle(mine)

    run(main)


def test_nothing_of_a_budget_moves_where_that_would_not_do() -> None:
    """What is held besides is too much, so the request waits until some of it is freed, and memory moves only then."""

    async def main() -> None:
        async with stepped_pool() as pool, Marks(pool):
            budget = pool.budget("mine", limit=SMALL)
            held, ours = await budget.allocate_async(2 * MIB), marked(pool, budget, 2)
            request = budget.allocate_async(3 * MIB)
            await asyncio.sleep(0.01)
            assert away(ours) == [False, False]
            held.free()
            (await request).free()
            assert away(ours) == [True, False]
            free(ours)

    run(main)


def test_the_limit_that_holds_a_request_up_decides_what_moves() -> None:
    """Of a budget in a budget, the inner one's memory where that is full, else whatever the outer one has."""

    async def main() -> None:
        async with stepped_pool() as pool, Marks(pool):
            outer = pool.budget("outer", limit=SMALL)
            inner = outer.budget("inner", limit=2 * MIB)
            outside, inside = marked(pool, outer, 2), marked(pool, inner, 2)
            (await inner.allocate_async(MIB)).free()
            assert (away(outside), away(inside)) == ([False, False], [True, False])
            async with outer.allocate_async(MIB), inner.allocate_async(MIB):
                assert (away(outside), away(inside)) == ([True, False], [True, False])
            (await outer.allocate_async(SMALL)).free()
            assert (away(outside), away(inside)) == ([True, True], [True, True])
            free(outside, inside)

    run(main)


def test_uses_of_more_than_a_budget_take_turns() -> None:
    """Three times its limit in marked memory comes and goes, and each byte is as it was written."""

    async def main() -> None:
        device = quick_device(backing=True)
        async with stepped_pool(device=device) as pool, Marks(pool):
            budget = pool.budget("mine", limit=SMALL)
            ours = []
            for number in range(12):
                buffer = await budget.allocate_async(MIB)
                fill(buffer, number)
                ours.append(pool.spillable(buffer))
                del buffer
            for number, one in enumerate(ours):
                async with one as buffer:
                    assert holds(buffer, number)
            assert budget.stats().peak_allocated == SMALL
            assert pool.stats().returns >= 8
            free(ours)

    run(main)


def test_threads_send_memory_of_their_budget_away_too() -> None:
    """By a call that would fail otherwise, and by one that blocks until somebody frees some."""
    with make_pool() as pool, Marks(pool):
        budget = pool.budget("mine", limit=SMALL)
        held, ours = budget.allocate(2 * MIB), marked(pool, budget, 2)
        budget.allocate(MIB).free()
        assert away(ours) == [True, False]
        with pytest.raises(OutOfMemoryError):
            budget.allocate(3 * MIB)
        assert away(ours) == [True, False]
        thread = threading.Thread(target=lambda: budget.allocate(SMALL, timeout=LONG).free())
        thread.start()
        while budget.stats().waiting == 0:
            pass
        held.free()
        thread.join(LONG)
        assert away(ours) == [True, True]
        free(ours)


def test_a_host_that_is_full_is_asked_again_for_a_budget() -> None:
    """Its requests wait meanwhile, and go on by themselves."""

    async def main() -> None:
        device = quick_device()
        pinned = device.pinned()
        async with make_pool(device) as pool, Marks(pool):
            budget = pool.budget("mine", limit=SMALL)
            ours = marked(pool, budget, 4)
            pinned.take_elsewhere(pinned.capacity)  # type: ignore[attr-defined]  # it is simulated, too
            request = budget.allocate_async(MIB)
            await until(lambda: bool(pool._opened.spilling._refused))
            assert not request.done()
            pinned.give_back_elsewhere(pinned.capacity)  # type: ignore[attr-defined]
            (await request).free()
            free(ours)

    run(main)


# -- leases ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["awaited", "called", "called from a thread"])
def test_a_lease_sends_its_own_memory_away(way: str) -> None:
    """It waits for nobody, and so not for others to free; what the pool can do by itself is done."""

    async def main() -> None:
        async with make_pool() as pool, Marks(pool), pool.lease(SMALL) as lease:
            ours = marked(pool, lease, 4)
            if way == "awaited":
                (await lease.allocate_async(2 * MIB)).free()
            elif way == "called":
                lease.allocate(2 * MIB).free()
            else:
                (await asyncio.to_thread(lease.allocate, 2 * MIB, timeout=LONG)).free()
            assert away(ours) == [True, True, False, False]
            async with ours[0] as buffer:
                assert buffer.alive
                assert lease.stats().allocated_bytes == 3 * MIB
                with pytest.raises(OutOfMemoryError):
                    await lease.allocate_async(SMALL)
            free(ours)

    run(main)


def test_a_lease_in_pieces_sends_away_until_one_piece_will_do() -> None:
    """Bytes enough are free, and no two of them beside each other."""

    async def main() -> None:
        async with stepped_pool() as pool, Marks(pool), pool.lease(SMALL) as lease:
            ours = marked(pool, lease, 4)
            ours[1].free()
            ours[3].free()
            async with ours[2]:
                (await lease.allocate_async(2 * MIB)).free()
            assert away([ours[0], ours[2]]) == [True, False]
            free(ours)

    run(main)


def test_memory_of_a_lease_does_not_move_for_the_pool() -> None:
    """The lease keeps its range, so nothing would be gained."""

    async def main() -> None:
        async with stepped_pool() as pool, Marks(pool):
            async with pool.lease(SMALL) as lease:
                ours = marked(pool, lease, 4)
                request = pool.allocate_async(LIMIT - SMALL + MIB)
                await asyncio.sleep(0.01)
                assert not any(away(ours))
            (await request).free()
            assert away(ours)[0]
            free(ours)

    run(main)


def test_requests_to_a_lease_end_in_every_way() -> None:
    """Cancelled, late, refused by a full host, or closed with its pool: none is left behind."""

    async def main() -> None:
        async with stepped_pool(spill_limit=0) as pool, Marks(pool), pool.lease(SMALL) as lease:
            ours = marked(pool, lease, 4)
            with pytest.raises(OutOfMemoryError):
                await lease.allocate_async(MIB)
            pool.configure(spill_limit=MIB)
            lease.allocate_async(MIB).cancel()
            task = asyncio.create_task(_take(lease, 2 * MIB))
            with pytest.raises(OutOfMemoryError):  # the host has room for one alone
                await task
            assert lease.stats().waiting == 0
            ours[0].free()
            ours[1].free()
            ours += marked(pool, lease, 2)
            with pytest.raises(PoolTimeout):
                await lease.allocate_async(MIB, timeout=0)
            free(ours)
        pool = stepped_pool()
        async with pool.lease(SMALL) as lease:
            ours = marked(pool, lease, 4)
            request = lease.allocate_async(MIB)
            pool._opened.close(PoolClosed(pool.name, "it ends"))
            with pytest.raises(PoolClosed):
                await request
            free(ours)
        await pool.aclose()

    run(main)


async def _take(share: Share, nbytes: int) -> None:
    (await share.allocate_async(nbytes)).free()


# -- what outlives its share -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["budget", "inner budget", "lease"])
def test_what_outlives_its_share_is_of_what_that_was_a_part_of(kind: str) -> None:
    """At home or away, it stays usable, and moves for whoever it can help from then on."""

    async def main() -> None:
        async with make_pool() as pool, Marks(pool):
            outer = pool.budget("outer", limit=SMALL)
            if kind == "lease":
                lease = pool.lease(SMALL)
                share: Share = await lease.__aenter__()
            else:
                lease, share = None, outer.budget("inner", limit=SMALL) if kind == "inner budget" else outer
            ours = marked(pool, share, 4)
            (await share.allocate_async(2 * MIB)).free()
            assert away(ours) == [True, True, False, False]
            if lease is not None:
                await lease.__aexit__(None, None, None)
            else:
                share.close()  # type: ignore[attr-defined]  # it is a budget
            if kind == "inner budget":
                (await outer.allocate_async(3 * MIB)).free()
                assert away(ours) == [True, True, True, False]
            (await pool.allocate_async(LIMIT)).free()
            assert all(away(ours))
            for one in ours:
                async with one as buffer:
                    assert buffer.alive
            free(ours)
            whole(pool)

    run(main)


def test_what_a_plan_places_stays_where_it_is() -> None:
    """Another step may want the very place."""
    plan = ReusePlan((PlannedPlace("a", MIB, 0, 1, 0),))
    with make_pool() as pool, pool.apply_plan(plan) as memory:
        buffer = memory.allocate(MIB)
        with pytest.raises(InvalidRequest, match="plan"):
            pool.spillable(buffer)
        buffer.free()
