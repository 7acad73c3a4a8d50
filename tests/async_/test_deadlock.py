"""DeadlockError is raised where nothing else can help, always, and never where somebody could still go on."""

import random
from contextlib import suppress

import anyio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncmem import AsyncMemoryPool, DeadlockError
from asyncmem.testing import StepLoop, run_steps
from tests.conservation import whole

from .loops import Run
from .support import MIB, stepped_pool, turns

pytestmark = pytest.mark.hazard("H23")


async def nested(pool: AsyncMemoryPool, first: int, second: int, caught: list[DeadlockError]) -> None:
    """Hold one block while waiting for the next."""
    try:
        async with pool.allocate_async(first * MIB):
            await turns(3)
            async with pool.allocate_async(second * MIB):
                await turns()
    except DeadlockError as error:
        caught.append(error)


def test_two_tasks_that_wait_for_each_other_are_told(virtually: Run) -> None:
    """Of two that hold by `async with` and wait for each other one gets DeadlockError with the table, one goes on."""

    async def main() -> None:
        async with stepped_pool() as pool:
            caught: list[DeadlockError] = []
            async with anyio.create_task_group() as group:
                group.start_soon(nested, pool, 4, 4, caught, name="left")
                group.start_soon(nested, pool, 4, 4, caught, name="right")
            assert len(caught) == 1
            assert {(owner.held, owner.waiting) for owner in caught[0].owners} == {(4 * MIB, 4 * MIB)}
            assert len(caught[0].owners) == 2
            assert "left" in str(caught[0])
            assert "right" in str(caught[0])
            assert pool.stats().deadlocks == 1
            whole(pool)

    virtually(main)


@pytest.mark.parametrize("seed", range(20))
def test_deadlock_is_found_in_every_order(seed: int) -> None:
    """However the steps of the two tasks interleave, both end, and with at least one of them told when they collide."""

    async def main() -> None:
        async with stepped_pool() as pool:
            caught: list[DeadlockError] = []
            async with anyio.create_task_group() as group:
                for _ in range(3):
                    group.start_soon(nested, pool, 2, 6, caught)
            assert caught
            whole(pool)

    run_steps(main(), StepLoop(seed))


def test_deadlock_that_forms_after_a_long_quiet_is_found(virtually: Run) -> None:
    """One waits, the other holds and works for a while in which nothing moves, and then waits for the first."""

    async def main() -> None:
        async with stepped_pool() as pool:
            caught: list[DeadlockError] = []

            async def work() -> None:
                try:
                    async with pool.allocate_async(4 * MIB):
                        await anyio.sleep(30)
                        async with pool.allocate_async(4 * MIB):
                            pass
                except DeadlockError as error:
                    caught.append(error)

            with anyio.fail_after(60):
                async with anyio.create_task_group() as group:
                    group.start_soon(work)
                    group.start_soon(nested, pool, 4, 4, caught)
            assert len(caught) == 1
            whole(pool)

    virtually(main)


def test_deadlock_that_a_lower_limit_makes_is_found(virtually: Run) -> None:
    """Two tasks wait in a budget that has room for one more, until its limit is lowered."""

    async def main() -> None:
        async with stepped_pool() as pool:
            budget = pool.budget("part", limit=6 * MIB)
            caught: list[DeadlockError] = []
            worker = await pool.allocate_async(4 * MIB)
            with anyio.fail_after(60):
                async with anyio.create_task_group() as group:
                    group.start_soon(nested, budget, 2, 2, caught)
                    group.start_soon(nested, budget, 2, 2, caught)
                    await anyio.sleep(10)
                    assert not caught  # who holds the rest of the pool may let go of it
                    budget.resize(limit=4 * MIB)
                    await anyio.sleep(10)
                    assert len(caught) == 1
            worker.free()
            whole(pool)

    virtually(main)


def test_task_that_waits_for_itself_is_told(virtually: Run) -> None:
    """A task that holds half and asks for more than the rest can only wait for itself."""

    async def main() -> None:
        async with stepped_pool() as pool:
            caught: list[DeadlockError] = []
            await nested(pool, 5, 4, caught)
            assert len(caught) == 1
            whole(pool)

    virtually(main)


def test_producer_whose_items_sit_in_a_queue_is_never_accused(virtually: Run) -> None:
    """Buffers that were handed on are nobody's: a producer that waits for its consumer just waits."""

    async def main() -> None:
        async with stepped_pool() as pool:
            send, receive = anyio.create_memory_object_stream[object](100)

            async def produce() -> None:
                async with send:
                    for _ in range(20):
                        await send.send(await pool.allocate_async(2 * MIB))

            async def consume() -> None:
                async with receive:
                    async for buffer in receive:
                        await anyio.sleep(1)
                        del buffer

            async with anyio.create_task_group() as group:
                group.start_soon(produce)
                group.start_soon(consume)
            assert pool.stats().waits > 0
            assert pool.stats().deadlocks == 0
            whole(pool)

    virtually(main)


def test_waiter_with_a_deadline_is_never_stuck(virtually: Run) -> None:
    """A deadline will end the wait by itself, so there is no deadlock to prove."""

    async def main() -> None:
        async with stepped_pool() as pool, pool.allocate_async(6 * MIB):
            with pytest.raises(TimeoutError):
                await pool.allocate_async(4 * MIB, timeout=5)
            assert pool.stats().deadlocks == 0

    virtually(main)


def test_named_owner_counts_as_holder(virtually: Run) -> None:
    """What is allocated inside `pool.owner(name)` is held by that name, with or without a block."""

    async def main() -> None:
        async with stepped_pool() as pool:
            with pool.owner("stage one"):
                kept = await pool.allocate_async(6 * MIB)
                with pytest.raises(DeadlockError, match="stage one"):
                    await pool.allocate_async(4 * MIB)
            kept.free()
            whole(pool)

    virtually(main)


def test_lease_counts_as_held(virtually: Run) -> None:
    """Two leases that each wait for the other's range are a deadlock too."""

    async def main() -> None:
        async with stepped_pool() as pool:
            caught: list[DeadlockError] = []

            async def lease() -> None:
                try:
                    async with pool.lease(4 * MIB):
                        await turns(3)
                        async with pool.lease(4 * MIB):
                            pass
                except DeadlockError as error:
                    caught.append(error)

            async with anyio.create_task_group() as group:
                group.start_soon(lease)
                group.start_soon(lease)
            assert len(caught) == 1
            whole(pool)

    virtually(main)


def test_deadlock_inside_a_budget_is_found(virtually: Run) -> None:
    """Two tasks that exhaust a budget between them are told, though the pool has plenty."""

    async def main() -> None:
        async with stepped_pool() as pool:
            budget = pool.budget("small", limit=4 * MIB)
            caught: list[DeadlockError] = []
            async with anyio.create_task_group() as group:
                group.start_soon(nested, budget, 2, 2, caught)
                group.start_soon(nested, budget, 2, 2, caught)
            assert len(caught) == 1
            whole(pool)

    virtually(main)


def test_a_holder_that_still_works_is_waited_for(virtually: Run) -> None:
    """Two waiters that hold are not stuck while a third, who holds too, is busy and will free."""

    async def main() -> None:
        async with stepped_pool() as pool:
            caught: list[DeadlockError] = []

            async def work() -> None:
                async with pool.allocate_async(4 * MIB):
                    await anyio.sleep(10)

            async with anyio.create_task_group() as group:
                group.start_soon(work)
                await turns(3)
                group.start_soon(nested, pool, 2, 4, caught)
                group.start_soon(nested, pool, 2, 4, caught)
            assert not caught
            whole(pool)

    virtually(main)


@settings(max_examples=60)
@given(
    stages=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    depth=st.integers(1, 3),
    items=st.integers(1, 12),
    seed=st.integers(0, 1000),
)
def test_safe_pipelines_are_never_accused(stages: list[int], depth: int, items: int, seed: int) -> None:
    """Bounded pipelines whose pool has room for what their queues can hold never raise, in whatever order they run."""
    most = (len(stages) + 1) * (depth + 1) + len(stages) + 1  # items in queues, at stages, and what stages work with

    async def main() -> None:
        async with stepped_pool(most * MIB) as pool:
            links = [anyio.create_memory_object_stream[object](depth) for _ in range(len(stages) + 1)]

            async def source() -> None:
                async with links[0][0] as out:
                    for _ in range(items):
                        await out.send(await pool.allocate_async(MIB))

            async def stage(number: int) -> None:
                async with links[number][1] as coming, links[number + 1][0] as out:
                    async for item in coming:
                        async with pool.allocate_batch([MIB // 4] * stages[number]):
                            await anyio.sleep(1)
                        await out.send(item)

            async def sink() -> None:
                async with links[-1][1] as coming:
                    async for item in coming:
                        await anyio.sleep(1)
                        del item

            async with anyio.create_task_group() as group:
                group.start_soon(source)
                for number in range(len(stages)):
                    group.start_soon(stage, number)
                group.start_soon(sink)
            assert pool.stats().deadlocks == 0

    run_steps(main(), StepLoop(seed))


@settings(max_examples=60)
@given(seed=st.integers(0, 10_000), tasks=st.integers(2, 6))
def test_random_hold_and_wait_always_ends(seed: int, tasks: int) -> None:
    """Tasks that take block inside block at random all end, some of them with DeadlockError, and nothing is lost."""

    async def main() -> None:
        async with stepped_pool() as pool:

            async def take(random_: random.Random, left: int) -> None:
                mib = random_.randrange(1, left + 1)
                async with pool.allocate_async(mib * MIB):
                    await turns(random_.randrange(3))
                    if left - mib > 0:
                        await take(random_, left - mib)

            async def play(number: int) -> None:
                with suppress(DeadlockError):
                    await take(random.Random(seed * 10 + number), 8)

            async with anyio.create_task_group() as group:
                for number in range(tasks):
                    group.start_soon(play, number)
            whole(pool)

    run_steps(main(), StepLoop(seed))
