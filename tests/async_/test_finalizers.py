"""Buffers and requests may be dropped anywhere: in the middle of the pool's own work, by the collector, in threads."""

import asyncio
import gc
import random
from collections.abc import Iterator

import anyio
import anyio.to_thread
import pytest

from asyncmem import AsyncMemoryPool
from tests.conservation import refillable, whole

from .loops import Run
from .support import LIMIT, MIB, make_pool, stepped_pool, turns

pytestmark = pytest.mark.hazard("H15")


class Cycle:
    """Keeps what it is given until the garbage collector comes."""

    def __init__(self, kept: object) -> None:
        self.kept = kept
        self.self = self


@pytest.fixture
def eager_collection() -> Iterator[None]:
    """Let the collector run at nearly every allocation of a Python object."""
    before = gc.get_threshold()
    gc.collect()
    gc.freeze()  # what there is already would be looked through each time
    gc.set_threshold(1)
    yield
    gc.set_threshold(*before)


@pytest.mark.usefixtures("eager_collection")
def test_garbage_is_given_back_from_within_the_pool(everywhere: Run) -> None:
    """Buffers and waiting requests in reference cycles are finalized while the pool is at work; nothing is lost."""

    async def main() -> None:
        async with make_pool() as pool:
            async with anyio.create_task_group() as group:
                for number in range(10):
                    group.start_soon(litter, pool, random.Random(number))
            gc.collect()
            whole(pool)
            await refillable(pool, LIMIT)

    async def litter(pool: AsyncMemoryPool, random_: random.Random) -> None:
        for _ in range(10):
            request = pool.allocate_async(random_.randrange(1, 4) * MIB)
            if random_.random() < 0.3:
                Cycle(request)
                del request
                gc.collect()
                continue
            Cycle(await request)
            del request
            await turns()
            gc.collect()  # whatever generation the cycle has come to by now

    everywhere(main)


def test_cycle_in_the_collector_wakes_a_waiter(virtually: Run) -> None:
    """Memory that only the collector finds goes to whoever waits for it."""

    async def main() -> None:
        async with stepped_pool() as pool:
            Cycle(await pool.allocate_async(LIMIT))
            request = pool.allocate_async(LIMIT)
            gc.collect(0)
            with anyio.fail_after(5):
                (await request).free()
            whole(pool)

    virtually(main)


@pytest.mark.may_block
def test_buffers_dropped_in_threads_reach_the_waiters(everywhere: Run) -> None:
    """Threads that drop buffers, and threads that allocate, share a pool with tasks that wait."""

    async def main() -> None:
        async with make_pool() as pool:

            def churn(seed: int) -> None:
                random_ = random.Random(seed)
                for _ in range(50):
                    buffer = pool.allocate(random_.randrange(1, 3) * MIB, timeout=30)
                    if random_.random() < 0.5:
                        Cycle(buffer)
                    del buffer  # held on to, it would be in the way of what this thread asks for next
                    gc.collect(0)

            async def wait() -> None:
                for _ in range(20):
                    async with pool.allocate_async(2 * MIB):
                        await turns()

            with anyio.fail_after(100):
                async with anyio.create_task_group() as group:
                    for seed in range(3):
                        group.start_soon(anyio.to_thread.run_sync, churn, seed)
                        group.start_soon(wait)
            gc.collect()
            whole(pool)

    everywhere(main)


@pytest.mark.parametrize("nth", range(1, 8))
def test_requests_may_end_while_they_are_listed(nth: int) -> None:
    """The collector may run whenever an object is made, and what it runs may end any request."""

    async def list_them() -> None:
        async with AsyncMemoryPool("host", limit="1 MiB") as pool:
            full = await pool.allocate_async("1 MiB")
            waiting = [pool.allocate_async("1 MiB") for _ in range(120)]  # more than Python keeps dictionaries for
            left = nth

            def end(phase: str, info: dict[str, int]) -> None:  # noqa: ARG001
                nonlocal left
                left -= phase == "start"
                if not left:
                    for request in waiting:
                        request.cancel()

            usual = gc.get_threshold()
            gc.callbacks.append(end)
            gc.set_threshold(1)
            try:
                pool.waiters()
            finally:
                gc.set_threshold(*usual)
                gc.callbacks.remove(end)
            for request in waiting:
                request.cancel()
            full.free()
            pool.check()

    asyncio.run(list_them())
