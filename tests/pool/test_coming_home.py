"""Memory that has moved to the host comes home when it is used."""

from __future__ import annotations

import asyncio
import threading

import pytest

from asyncmem import AsyncMemoryPool, InvalidRequest, OutOfMemoryError, PoolTimeout, Spillable
from tests.conservation import whole

from .spilling import (
    HALF,
    LIMIT,
    LONG,
    Marks,
    crowded_out,
    fill,
    holds,
    make_pool,
    run,
    stepped_pool,
    until,
    use,
    waiting_for,
)
from .support import quick_device


@pytest.mark.parametrize("name", ["simulated", "host"])
def test_every_block_sees_its_own_bytes(name: str) -> None:
    """Six halves take turns over two, and each is changed by each block."""

    async def main() -> None:
        device = quick_device(backing=True) if name == "simulated" else "host"
        async with AsyncMemoryPool(device, limit=LIMIT, segment_size=HALF) as pool:
            marked = []
            for number in range(6):
                buffer = await pool.allocate_async(HALF)
                fill(buffer, number)
                marked.append(pool.spillable(buffer))
            for turn in range(3):
                for number, one in enumerate(marked):
                    async with one as buffer:
                        assert holds(buffer, number + turn)
                        fill(buffer, number + turn + 1)
            assert pool.stats().returns == 18
            assert pool.stats().peak_allocated <= LIMIT
            for one in marked:
                one.free()
            whole(pool)

    run(main)


@pytest.mark.may_block  # the worker is steps of the loop
def test_two_that_bring_each_other_out_take_turns() -> None:
    """Over a limit that fits one: each use is followed by the other's, and none is cut short."""

    async def main() -> None:
        async with stepped_pool(device=quick_device(backing=True)) as pool, Marks(pool) as marks:
            marked = [await marks(LIMIT) for _ in range(2)]
            for one in marked:
                async with one as buffer:
                    fill(buffer, 0)

            async def work(one: Spillable) -> None:
                for turn in range(20):
                    async with one as buffer:
                        assert holds(buffer, turn)
                        await asyncio.sleep(0)
                        fill(buffer, turn + 1)

            await asyncio.gather(*map(work, marked))
            assert pool.stats().returns >= 20

    run(main)


def test_tasks_that_want_the_same_bring_it_home_once() -> None:
    """They share one request, so a limit that fits one copy is enough."""

    async def main() -> None:
        async with crowded_out() as (pool, marked, held):
            inside = 0

            async def work() -> None:
                nonlocal inside
                async with marked:
                    inside += 1
                    await until(lambda: inside == 3)

            tasks = [asyncio.create_task(work()) for _ in range(3)]
            await until(lambda: pool.stats().waiting == 1)
            held.free()
            await asyncio.gather(*tasks)
            assert pool.stats().returns == 1

    run(main)


def test_another_goes_on_where_the_first_is_cancelled() -> None:
    """Nothing is lost with whoever was bringing it home."""

    async def main() -> None:
        async with crowded_out() as (pool, marked, held):
            first = await waiting_for(pool, marked)
            second = asyncio.create_task(use(marked))
            await asyncio.sleep(0)
            first.cancel()
            await asyncio.wait([first])
            assert first.cancelled()
            await until(lambda: pool.stats().waiting == 1)
            held.free()
            await second
            marked.free()
            whole(pool)

    run(main)


def test_a_use_may_be_limited_in_time() -> None:
    """Its own request's, and a wait for somebody else's."""

    async def main() -> None:
        async with crowded_out() as (pool, marked, held):
            with pytest.raises(PoolTimeout):
                async with marked.use(timeout=0.01):
                    pass
            other = await waiting_for(pool, marked)
            with pytest.raises(PoolTimeout):
                async with marked.use(timeout=0.01):
                    pass
            assert pool.stats().timeouts == 2
            held.free()
            await other

    run(main)


def test_urgent_uses_come_first() -> None:
    """The priority is that of the request."""

    async def main() -> None:
        async with make_pool() as pool, Marks(pool) as marks:
            marked = [await marks(LIMIT), await marks(LIMIT)]
            held = await pool.allocate_async(LIMIT)
            order = []

            async def work(number: int, priority: int) -> None:
                async with marked[number].use(priority=priority):
                    order.append(number)

            tasks = [asyncio.create_task(work(0, 0)), asyncio.create_task(work(1, 5))]
            await until(lambda: pool.stats().waiting == 2)
            held.free()
            await asyncio.gather(*tasks)
            assert order == [1, 0]

    run(main)


def test_a_budget_is_charged_for_what_is_at_home() -> None:
    """What is away leaves room in its budget, and comes home through its queue."""
    with make_pool() as pool, Marks(pool) as marks:
        budget = pool.budget("stage", limit=HALF)
        marks.made.append(marked := budget.spillable(budget.allocate(HALF)))
        pool.allocate(LIMIT).free()
        assert budget.stats().allocated_bytes == 0
        held = budget.allocate(HALF)
        with pytest.raises(OutOfMemoryError), marked:
            pass
        held.free()
        with marked:
            assert budget.stats().allocated_bytes == HALF


def test_threads_take_turns() -> None:
    """Each waits for as long as it says; each sees its own bytes."""
    with make_pool(quick_device(backing=True)) as pool, Marks(pool) as marks:
        marked = [marks.now(LIMIT) for _ in range(3)]
        for one in marked:
            with one as buffer:
                fill(buffer, 0)
        wrong: list[object] = []

        def work(one: Spillable) -> None:
            try:
                for turn in range(8):
                    with one.use(timeout=LONG) as buffer:
                        if not holds(buffer, turn):
                            wrong.append((one, turn))
                        fill(buffer, turn + 1)
            except BaseException as error:
                wrong.append(error)
                raise

        threads = [threading.Thread(target=work, args=(one,)) for one in marked]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(2 * LONG)
        assert not wrong
        for one in marked:
            one.free()
        whole(pool)


def test_a_thread_without_a_deadline_has_it_now_or_not_at_all() -> None:
    """As `allocate` returns; with one it waits."""
    with make_pool() as pool, Marks(pool) as marks:
        marked = marks.now(LIMIT)
        held = pool.allocate(LIMIT)
        with pytest.raises(OutOfMemoryError), marked:
            pass
        with pytest.raises(PoolTimeout), marked.use(timeout=0.01):
            pass
        held.free()
        with marked:
            pass


def test_a_blocking_use_on_a_loop_does_not_wait_for_that_loop() -> None:
    """The task that brings it home could never go on."""

    async def main() -> None:
        async with crowded_out() as (pool, marked, held):
            task = await waiting_for(pool, marked)
            with pytest.raises(InvalidRequest, match="async with"), marked:
                pass
            held.free()
            await task

    run(main)
