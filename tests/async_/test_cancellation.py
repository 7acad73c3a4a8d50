"""Cancelled means that nothing happened: bytes and wake-ups go on to the others, and the caller hears of it."""

import asyncio
import inspect

import anyio
import pytest

from asyncmem import AsyncMemoryPool, RequestCancelled
from asyncmem.core import Batch, Buffer
from asyncmem.testing import run_steps
from tests.conservation import whole

from .loops import Run
from .support import LIMIT, MIB, stepped_pool, turns


async def waiting_task(pool: AsyncMemoryPool, nbytes: int) -> "asyncio.Task[Buffer]":
    """A task that waits in the queue."""
    task = asyncio.ensure_future(pool.allocate_async(nbytes))
    await turns(2)
    assert not task.done()
    return task


@pytest.mark.hazard("H1")
def test_grant_that_meets_a_cancellation_goes_to_the_next() -> None:
    """A waiter cancelled between its grant and its wake-up gives the bytes back, and the next one gets them."""

    async def main() -> None:
        async with stepped_pool() as pool:
            held = await pool.allocate_async(LIMIT)
            first = await waiting_task(pool, LIMIT)
            second = await waiting_task(pool, LIMIT)
            held.free()
            first.cancel()
            (await second).free()
            assert first.cancelled()
            assert pool.stats().handed_back == 1
            whole(pool)

    run_steps(main())


@pytest.mark.hazard("H2")
def test_cancelled_head_lets_its_follower_through_at_once(virtually: Run) -> None:
    """A small request behind a big head is granted in the very call that cancels the head."""

    async def main() -> None:
        async with stepped_pool(bypass=0) as pool:
            held = await pool.allocate_async(6 * MIB)
            head = pool.allocate_async(8 * MIB)
            small = pool.allocate_async(2 * MIB)
            assert not small.done()
            assert head.cancel()
            assert small.done()
            held.free()
            small.result().free()

    virtually(main)


@pytest.mark.hazard("H3")
def test_release_followed_by_a_cancellation_wakes_somebody_else() -> None:
    """The wake-up of a cancelled waiter is not lost, in whatever order release and cancellation come."""

    async def main(cancel_first: bool) -> None:
        async with stepped_pool() as pool:
            held = await pool.allocate_async(LIMIT)
            tasks = [await waiting_task(pool, LIMIT) for _ in range(3)]
            if cancel_first:
                tasks[0].cancel()
                held.free()
            else:
                held.free()
                tasks[0].cancel()
            for task in tasks[1:]:
                (await task).free()

    run_steps(main(cancel_first=True))
    run_steps(main(cancel_first=False))


@pytest.mark.hazard("H4")
def test_cancellation_is_never_swallowed() -> None:
    """Once cancel() answered True the task ends cancelled, though its grant had come in the same tick."""

    async def main() -> None:
        async with stepped_pool() as pool:
            held = await pool.allocate_async(LIMIT)
            task = await waiting_task(pool, LIMIT)
            held.free()
            assert task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert task.cancelled()
            assert task.cancelling() == 1

    run_steps(main())


async def by_timeout(pool: AsyncMemoryPool) -> None:
    async with asyncio.timeout(3):
        await pool.allocate_async(MIB)


async def by_wait_for(pool: AsyncMemoryPool) -> None:
    await asyncio.wait_for(pool.allocate_async(MIB), 3)


async def by_scope(pool: AsyncMemoryPool) -> None:
    with anyio.fail_after(3):
        await pool.allocate_async(MIB)


TIME_LIMITS = {"timeout": by_timeout, "wait_for": by_wait_for, "scope": by_scope}


@pytest.mark.hazard("H4")
@pytest.mark.parametrize("limit", TIME_LIMITS)
def test_time_limits_from_outside_bound_a_wait(limit: str) -> None:
    """asyncio.timeout, wait_for and anyio's limits end a wait for memory on time, and leave nothing behind."""

    async def main() -> None:
        async with stepped_pool() as pool:
            held = await pool.allocate_async(LIMIT)
            started = asyncio.get_running_loop().time()
            with pytest.raises(TimeoutError):
                await TIME_LIMITS[limit](pool)
            assert asyncio.get_running_loop().time() - started == pytest.approx(3)
            task = asyncio.current_task()
            assert task is not None
            assert not task.cancelling()
            held.free()
            whole(pool)

    run_steps(main())


@pytest.mark.hazard("H5")
def test_giving_back_never_awaits() -> None:
    """free() and both kinds of exit do their work without an await that a cancellation could interrupt."""
    for kind in (Buffer, Batch):
        assert not inspect.iscoroutinefunction(kind.free)
        assert not inspect.iscoroutinefunction(kind.__exit__)


@pytest.mark.hazard("H5", "H21")
def test_blocks_end_properly_in_a_scope_that_stays_cancelled(virtually: Run) -> None:
    """In a cancelled scope, where every await raises, buffers, batches and leases are given back all the same."""

    async def main() -> None:
        async with stepped_pool() as pool:
            with anyio.CancelScope() as scope:
                async with (
                    pool.allocate_async(MIB),
                    pool.allocate_batch([MIB, MIB]),
                    pool.lease(2 * MIB) as lease,
                    lease.allocate_async(MIB),
                ):
                    scope.cancel()
                    await anyio.sleep(1)
            assert scope.cancelled_caught
            whole(pool)

    virtually(main)


@pytest.mark.hazard("H21")
def test_waiters_of_a_cancelled_scope_leave_the_queue(virtually: Run) -> None:
    """Many waiters that are cancelled together leave nothing in the queue."""

    async def main() -> None:
        async with stepped_pool() as pool, pool.allocate_async(LIMIT):
            with anyio.CancelScope() as scope:
                async with anyio.create_task_group() as group:
                    for _ in range(5):
                        group.start_soon(wait, pool)
                    await turns(3)
                    assert pool.stats().waiting == 5
                    scope.cancel()
            assert pool.stats().waiting == 0
            assert pool.stats().cancellations == 5

    async def wait(pool: AsyncMemoryPool) -> None:
        await pool.allocate_async(MIB)

    virtually(main)


def test_request_that_cancels_itself_raises_its_own_error(virtually: Run) -> None:
    """cancel() ends the request alone; whoever awaits it gets RequestCancelled on every loop."""

    async def main() -> None:
        async with stepped_pool() as pool, pool.allocate_async(LIMIT):
            request = pool.allocate_async(MIB)
            seen: list[object] = []
            request.add_done_callback(seen.append)

            async def wait() -> None:
                with pytest.raises(RequestCancelled) as caught:
                    await request
                assert caught.value.asked == MIB

            async with anyio.create_task_group() as group:
                group.start_soon(wait)
                await turns(3)
                assert request.cancel()
            assert request.cancelled()
            assert not request.cancel()
            await turns(2)
            assert seen == [request]
            with pytest.raises(RequestCancelled):
                await request

    virtually(main)


def test_granted_request_can_no_longer_be_cancelled(virtually: Run) -> None:
    """cancel() of a request that is done answers False and changes nothing."""

    async def main() -> None:
        async with stepped_pool() as pool:
            held = await pool.allocate_async(LIMIT)
            request = pool.allocate_async(MIB)
            held.free()
            assert request.done()
            assert not request.cancel()
            with await request as buffer:
                assert buffer.alive
            hit = pool.allocate_async(MIB)
            assert not hit.cancel()
            hit.result().free()
            whole(pool)

    virtually(main)


def test_dropped_request_gives_back_its_place_or_its_memory(virtually: Run) -> None:
    """A request that nobody awaits frees its memory, or leaves the queue, when it is dropped."""

    async def main() -> None:
        async with stepped_pool() as pool:
            held = await pool.allocate_async(LIMIT)
            blocking = pool.allocate_async(LIMIT)
            behind = pool.allocate_async(MIB)
            del blocking
            held.free()
            assert behind.done()
            del behind
            assert pool.stats().allocated_bytes == 0
            del held
            dropped = pool.allocate_async(MIB)
            assert dropped.done()
            del dropped
            whole(pool)

    virtually(main)


def test_cancelling_one_of_two_who_await_a_request_leaves_it_to_the_other() -> None:
    """A request that two tasks await ends only when the last of them is cancelled."""

    async def main() -> None:
        async with stepped_pool() as pool:
            held = await pool.allocate_async(LIMIT)
            request = pool.allocate_async(MIB)

            async def wait() -> Buffer:
                return await request

            first, second = asyncio.create_task(wait()), asyncio.create_task(wait())
            await turns(2)
            first.cancel()
            await turns(2)
            assert not request.done()
            held.free()
            buffer = await second
            assert buffer is request.result()
            buffer.free()
            whole(pool)

    run_steps(main())


def test_task_made_from_a_request_can_be_cancelled_before_it_starts() -> None:
    """create_task(request) that is cancelled before its first step takes its place out of the queue."""

    async def main() -> None:
        async with stepped_pool() as pool:
            held = await pool.allocate_async(LIMIT)
            task = asyncio.create_task(pool.allocate_async(MIB))
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert pool.stats().waiting == 0
            held.free()
            whole(pool)

    run_steps(main())


def test_what_came_before_a_cancelled_task_began_is_given_back() -> None:
    """The task that nobody has dropped yet keeps nothing either."""

    async def main() -> None:
        async with stepped_pool() as pool:
            held = await pool.allocate_async(LIMIT)
            task = asyncio.create_task(pool.allocate_async(MIB))
            held.free()  # the grant is there at once
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert pool.stats().handed_back == 1
            whole(pool)

    run_steps(main())


def test_a_cancelled_task_takes_nothing_from_others_that_wait_for_its_request() -> None:
    """The request goes on for them, whether its task has begun or not."""

    async def main() -> None:
        async with stepped_pool() as pool:
            held = await pool.allocate_async(LIMIT)
            request = pool.allocate_async(MIB)

            async def share() -> Buffer:
                return await request

            other = asyncio.create_task(share())
            await turns(2)
            task = asyncio.create_task(request)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            held.free()
            (await other).free()
            whole(pool)

    run_steps(main())
