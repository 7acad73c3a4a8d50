"""A pool serves one event loop at a time, says so to a second one, and outlives the loop it served."""

import asyncio
import threading

import anyio
import anyio.to_thread
import pytest

import asyncmem
from asyncmem import AsyncMemoryPool, InvalidRequest
from tests.conservation import refillable, whole

from .loops import LOOPS, Run
from .support import LIMIT, MIB, GatedDevice, make_pool, turns


async def hold_and_wait(pool: AsyncMemoryPool) -> None:
    """Have one task wait for the other, so that the pool binds to the loop."""

    async def use() -> None:
        async with pool.allocate_async(LIMIT):
            await turns(3)

    async with anyio.create_task_group() as group:
        group.start_soon(use)
        group.start_soon(use)


@pytest.mark.hazard("H24")
def test_waiting_works_on_every_loop(everywhere: Run) -> None:
    """Waits, batches, leases and budgets work on asyncio in debug mode, with eager tasks, on uvloop and on trio."""

    async def main() -> None:
        async with make_pool(segment_size=2 * MIB) as pool:
            budget = pool.budget("part", limit=4 * MIB)

            async def singles(share: AsyncMemoryPool) -> None:
                for mib in (3, 1, 2):
                    async with share.allocate_async(mib * MIB):
                        await turns()

            async def batches() -> None:
                for _ in range(3):
                    async with pool.allocate_batch([MIB, 2 * MIB, MIB]):
                        await turns()

            async def leases() -> None:
                for _ in range(3):
                    async with pool.lease(5 * MIB) as lease, lease.allocate_async(5 * MIB):
                        await turns()

            async with anyio.create_task_group() as group:
                for share in (pool, pool, budget, budget):
                    group.start_soon(singles, share)
                for _ in range(2):
                    group.start_soon(batches)
                    group.start_soon(leases)
            whole(pool)
            await refillable(pool, LIMIT)

    everywhere(main)


@pytest.mark.hazard("H12")
@pytest.mark.parametrize("second", LOOPS, ids=lambda run: run.__name__)
def test_pool_outlives_its_loop(everywhere: Run, second: Run) -> None:
    """A pool made as a global is used by one run after another, also by different kinds of loop."""
    pool = make_pool()
    everywhere(lambda: hold_and_wait(pool))
    second(lambda: hold_and_wait(pool))
    whole(pool)
    second(pool.aclose)


def test_entering_meets_the_loop(everywhere: Run) -> None:
    """Who opens a pool by `async with` will wait on this loop, and finds no more to do at the first wait than later."""

    async def main() -> None:
        async with make_pool() as pool:
            loop = pool._opened.core.loop
            assert loop is not None
            assert loop.is_running_here()

    everywhere(main)


@pytest.mark.hazard("H12")
@pytest.mark.may_block
def test_second_loop_is_refused_while_the_first_is_served(everywhere: Run) -> None:
    """Waiting on a second loop in another thread raises an error that names both, and harms nobody."""

    async def main() -> None:
        async with make_pool() as pool:
            await hold_and_wait(pool)
            async with pool.allocate_async(LIMIT):
                error = str(await anyio.to_thread.run_sync(asyncio.run, waits_elsewhere(pool)))
            served, refused = error.split("got")
            assert "<" in served.split("serves")[1], "the loop that is served is not named"
            assert "<" in refused, "the loop that is refused is not named"
            await hold_and_wait(pool)
            whole(pool)

    async def waits_elsewhere(pool: AsyncMemoryPool) -> Exception:
        with pytest.raises(InvalidRequest) as caught:
            await pool.allocate_async(MIB)
        return caught.value

    everywhere(main)


@pytest.mark.hazard("H14")
@pytest.mark.may_block
def test_growth_that_ends_after_the_loop_disturbs_nobody(everywhere: Run) -> None:
    """A segment that comes when its loop is closed is kept for the next loop; no thread raises."""
    device = GatedDevice()
    pool = make_pool(device=device)

    async def give_up() -> None:
        async with anyio.create_task_group() as group:
            group.start_soon(wait)
            await anyio.to_thread.run_sync(device.entered.wait, 30)
            group.cancel_scope.cancel()

    async def wait() -> None:
        await pool.allocate_async(MIB)

    everywhere(give_up)
    device.gate.set()
    everywhere(lambda: hold_and_wait(pool))
    whole(pool)
    everywhere(pool.aclose)


@pytest.mark.hazard("H14")
@pytest.mark.may_block
def test_release_from_a_thread_after_the_loop_is_closed(everywhere: Run) -> None:
    """A request whose loop ended without it can still be granted, freed and dropped from any thread."""
    pool = make_pool()
    held = pool.allocate(LIMIT)
    kept: list[object] = []

    async def leave_waiting() -> None:
        await hold_first(pool)
        kept.append(pool.allocate_async(MIB))

    async def hold_first(pool: AsyncMemoryPool) -> None:
        with anyio.move_on_after(0.01):
            await pool.allocate_async(MIB)

    everywhere(leave_waiting)
    thread = threading.Thread(target=held.free)
    thread.start()
    thread.join()
    kept.clear()
    whole(pool)
    everywhere(pool.aclose)


@pytest.mark.hazard("H12")
def test_runtime_pool_survives_a_second_run(everywhere: Run) -> None:
    """The process's pool of a device serves one run after another."""

    async def main() -> int:
        runtime = asyncmem.device("simulated:7")
        async with runtime.pool.allocate_async(MIB) as buffer:
            return buffer.nbytes

    assert everywhere(main) == MIB
    assert everywhere(main) == MIB


@pytest.mark.filterwarnings("error")
def test_run_inside_a_loop_says_to_await() -> None:
    """One error, and no warning of a coroutine that nobody awaited; the loop goes on."""

    async def inner() -> int:
        return 3

    async def main() -> int:
        for given in (inner, inner()):
            with pytest.raises(RuntimeError, match="`await` the coroutine instead") as caught:
                asyncmem.run(given)
            assert caught.value.__context__ is None
        return await inner()

    assert asyncmem.run(main) == 3


def test_run_refuses_what_is_no_program() -> None:
    """By the package's error."""
    with pytest.raises(InvalidRequest, match="main: expected a coroutine, or a function that makes one, got 3"):
        asyncmem.run(3)  # type: ignore[arg-type]


@pytest.mark.may_block
def test_frees_from_threads_wake_waiters(everywhere: Run) -> None:
    """Memory freed by other threads reaches the tasks that wait for it, however many threads there are."""

    async def main() -> None:
        async with make_pool() as pool:

            async def pass_on() -> None:
                buffer = await pool.allocate_async(3 * MIB)
                await anyio.to_thread.run_sync(buffer.free)

            with anyio.fail_after(100):
                async with anyio.create_task_group() as group:
                    for _ in range(60):
                        group.start_soon(pass_on)
            whole(pool)

    everywhere(main)
