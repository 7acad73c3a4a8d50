"""Long queues and hot loops cost what they should, and starve nobody."""

import random
import time

import anyio.lowlevel
import pytest

from asyncmem import AsyncMemoryPool, TooManyRequests
from tests.conservation import refillable, whole

from .loops import Run
from .support import LIMIT, MIB, make_pool, stepped_pool, turns


def seconds_to_cancel(pool: AsyncMemoryPool, count: int) -> float:
    """Time to cancel that many waiters in random order, per waiter; the least of five."""
    best = float("inf")
    for _ in range(5):
        requests = [pool.allocate_async(MIB) for _ in range(count)]
        random.Random(1).shuffle(requests)
        started = time.thread_time()  # which a busy machine does not stretch
        for request in requests:
            request.cancel()
        best = min(best, (time.thread_time() - started) / count)
    return best


@pytest.mark.hazard("H18")
def test_cancelling_a_long_queue_costs_each_waiter_the_same(virtually: Run) -> None:
    """Ten times as many waiters make a cancellation at most three times as dear."""

    async def main() -> None:
        async with stepped_pool() as pool, pool.allocate_async(LIMIT):
            few, many = seconds_to_cancel(pool, 1_000), seconds_to_cancel(pool, 10_000)
            assert pool.stats().waiting == 0
            assert many < 3 * few

    virtually(main)


@pytest.mark.hazard("H18")
def test_storm_of_cancelled_tasks_leaves_the_queue_clean(everywhere: Run) -> None:
    """Two thousand tasks that are cancelled in one scope leave nothing behind."""

    async def main() -> None:
        async with make_pool() as pool:
            async with pool.allocate_async(LIMIT), anyio.create_task_group() as group:
                for _ in range(2_000):
                    group.start_soon(wait, pool)
                while pool.stats().waiting < 2_000:
                    await turns()
                group.cancel_scope.cancel()
            whole(pool)
            await refillable(pool, LIMIT)

    async def wait(pool: AsyncMemoryPool) -> None:
        await pool.allocate_async(MIB)

    everywhere(main)


@pytest.mark.hazard("H19")
def test_hot_loop_of_hits_lets_others_run(everywhere: Run) -> None:
    """A task that only ever gets memory at once yields to the others from time to time."""

    async def main() -> int:
        ticks = 0
        done = False

        async def tick() -> None:
            nonlocal ticks
            while not done:
                ticks += 1
                await anyio.lowlevel.checkpoint()

        async with make_pool() as pool, anyio.create_task_group() as group:
            (await pool.allocate_async(4096)).free()
            group.start_soon(tick)
            await turns()
            before = ticks
            for _ in range(10_000):
                await pool.allocate_async(4096)
            after = ticks
            done = True
        return after - before

    assert 3 <= everywhere(main) <= 100


@pytest.mark.hazard("H19")
def test_hit_completes_without_a_step_of_the_loop(everywhere: Run) -> None:
    """An await that finds memory does not suspend its task."""

    async def main() -> None:
        async with make_pool() as pool:
            (await pool.allocate_async(4096)).free()
            ran: list[int] = []

            async def other() -> None:
                ran.append(1)

            async with anyio.create_task_group() as group:
                group.start_soon(other)
                for _ in range(10):
                    before = len(ran)
                    (await pool.allocate_async(4096)).free()
                    assert len(ran) == before

    everywhere(main)


@pytest.mark.parametrize("most", [0, 4])
def test_growth_is_no_waiting(virtually: Run, most: int) -> None:
    """Requests that wait for the pool to grow alone are not bounded by max_waiting, and count as growing."""

    async def main() -> None:
        async with stepped_pool(64 * MIB, max_waiting=most) as pool:
            requests = [pool.allocate_async(MIB) for _ in range(20)]
            assert (pool.stats().waiting, pool.stats().growing) == (0, 20)
            held = [await request for request in requests]
            assert (pool.stats().waits, pool.stats().growth_waits) == (0, 20)
            assert "0 waits so far" in pool.summary()
            assert "20 requests so far" in pool.summary()
            del held, requests

    virtually(main)


def test_full_queue_refuses_newcomers(virtually: Run) -> None:
    """With max_waiting requests in the queue the next one gets TooManyRequests, and the others stay."""

    async def main() -> None:
        async with stepped_pool(max_waiting=2) as pool:
            held = await pool.allocate_async(LIMIT)
            waiting = [pool.allocate_async(MIB) for _ in range(2)]
            with pytest.raises(TooManyRequests) as caught:
                await pool.allocate_async(MIB)
            assert (caught.value.waiting, caught.value.max_waiting) == (2, 2)
            waiting[0].cancel()
            third = pool.allocate_async(MIB)
            held.free()
            for request in (waiting[1], third):
                (await request).free()
            whole(pool)

    virtually(main)
