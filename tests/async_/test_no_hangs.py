"""Programs in which somebody could wait for ever or hold up others: all end, and nobody is accused wrongly."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import pytest

from asyncmem import AsyncMemoryPool, Budget, DeadlockError, InvalidRequest, PoolTimeout
from tests.conservation import whole

from .loops import Run
from .support import LIMIT, MIB, quick_device, stepped_pool

Share = AsyncMemoryPool | Budget
HOST = {"limit": LIMIT, "segment_size": LIMIT, "stall_after": None}


class Outcomes:
    """What became of tasks, by name."""

    def __init__(self) -> None:
        self.served: list[str] = []
        self.accused: list[str] = []

    async def after(self, name: str, start: float, share: Share, *sizes: int) -> None:
        """Take sizes inside of each other, with a pause of two seconds between."""
        await anyio.sleep(start)
        try:
            await self._take(share, sizes)
        except DeadlockError:
            self.accused.append(name)
        else:
            self.served.append(name)

    async def _take(self, share: Share, sizes: tuple[int, ...]) -> None:
        async with share.allocate_async(sizes[0]):
            if sizes[1:]:
                await anyio.sleep(2)
                await self._take(share, sizes[1:])


# -- behind others -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("segments", ["stream_ordered", "paged", "direct"])
def test_the_pool_grows_for_one_who_may_pass_the_first_in_the_queue(virtually: Run, segments: str) -> None:
    """A holds 5 of 8 MiB, B waits for 7, A asks for 1 more: B would be served only after A."""

    async def main() -> None:
        found = Outcomes()
        async with stepped_pool(segment_size=MIB, segments=segments) as pool, anyio.create_task_group() as group:
            group.start_soon(found.after, "A", 0, pool, 5 * MIB, MIB)
            group.start_soon(found.after, "B", 1, pool, 7 * MIB)
        assert (found.served, found.accused) == (["A", "B"], [])

    virtually(main)


@pytest.mark.parametrize("where", ["pool", "budget", "nested"])
def test_a_deadlock_behind_one_who_must_not_be_passed_is_found(virtually: Run, where: str) -> None:
    """A holds 2 of 8 MiB and stands behind B, who waits for all: in the pool and in budgets alike."""

    async def main() -> None:
        found = Outcomes()
        async with stepped_pool(bypass=0) as pool, anyio.create_task_group() as group:
            outer: Share = pool if where == "pool" else pool.budget("outer", limit=LIMIT)
            inner = outer.budget("inner", limit=LIMIT) if where == "nested" else outer
            group.start_soon(found.after, "A", 0, inner, 2 * MIB, 2 * MIB)
            group.start_soon(found.after, "B", 1, outer, LIMIT)
        assert (found.served, found.accused) == (["B"], ["A"])

    virtually(main)


@pytest.mark.parametrize("where", ["pool", "budget"])
def test_a_deadlock_behind_a_used_up_allowance_is_found(virtually: Run, where: str) -> None:
    """Others have passed B for as much as they may, so A has to stay behind it."""

    async def main() -> None:
        found = Outcomes()
        async with stepped_pool(8 * LIMIT) as pool, anyio.create_task_group() as group:
            if where == "pool":
                pool.resize(limit=LIMIT)
            share = pool if where == "pool" else pool.budget("b", limit=LIMIT)
            group.start_soon(found.after, "A", 0, share, 2 * MIB, 2 * MIB)
            group.start_soon(found.after, "B", 1, share, LIMIT)
            await anyio.sleep(1.5)
            for _ in range(16):
                (await share.allocate_async(MIB)).free()
        assert (found.served, found.accused) == (["B"], ["A"])

    virtually(main)


def test_a_request_that_was_not_served_uses_up_no_budget(virtually: Run) -> None:
    """B waits for the pool, so A gets what it asks of B's budget, and then frees what B needs."""

    async def main() -> None:
        found = Outcomes()
        async with stepped_pool() as pool, anyio.create_task_group() as group:
            one, two = pool.budget("one", limit=5 * MIB), pool.budget("two", limit=7 * MIB)

            async def first() -> None:
                async with one.allocate_async(4 * MIB):
                    await anyio.sleep(2)
                    await found.after("A", 0, two, 2 * MIB)

            group.start_soon(first)
            group.start_soon(found.after, "B", 1, two, 7 * MIB)
        assert (found.served, found.accused) == (["A", "B"], [])

    virtually(main)


def test_a_batch_that_cannot_lie_between_what_its_own_task_holds_is_refused(virtually: Run) -> None:
    """There are bytes enough below the limit, and nobody else could make them lie together."""

    async def main() -> None:
        async with stepped_pool() as pool:
            pieces = [pool.allocate(MIB) for _ in range(8)]
            for piece in pieces[::2]:
                piece.free()
            with pieces[1], pieces[3], pieces[5], pieces[7]:
                with pytest.raises(DeadlockError):
                    await pool.allocate_batch([2 * MIB, 512])
                (await pool.allocate_batch([MIB] * 4)).free()
            whole(pool)

    virtually(main)


# -- limits that are lowered -------------------------------------------------------------------------------------------


def test_a_budget_that_is_lowered_holds_up_nobody_else(virtually: Run) -> None:
    """Whoever waits in it goes on to wait; others are served, and nobody is asked to do anything meanwhile."""

    async def main() -> None:
        async with stepped_pool(segment_size=MIB) as pool, anyio.create_task_group() as group:
            budget = pool.budget("b", limit=4 * MIB)
            little, most = budget.allocate(512), pool.allocate(7 * MIB)
            served: list[str] = []

            async def take(name: str, share: Share, nbytes: int) -> None:
                async with share.allocate_async(nbytes):
                    served.append(name)

            group.start_soon(take, "pool's", pool, 3 * MIB)
            await anyio.sleep(0.1)
            group.start_soon(take, "budget's", budget, MIB)
            await anyio.sleep(0.1)
            budget.resize(limit=MIB)
            most.free()
            await anyio.sleep(1)
            before = pool.stats()
            await anyio.sleep(60)
            after = pool.stats()
            assert (after.grows, after.trims, after.driver_calls) == (before.grows, before.trims, before.driver_calls)
            assert served == ["pool's"]
            await take("other", pool, 6 * MIB)
            little.free()
        assert served == ["pool's", "other", "budget's"]

    virtually(main)


def test_batches_of_nothing_are_granted_whatever_the_limit(virtually: Run) -> None:
    """Above a limit that was lowered, behind others, and without being in anybody's way."""

    async def main() -> None:
        async with stepped_pool(2 * LIMIT) as pool, anyio.create_task_group() as group:
            held = await pool.allocate_async(LIMIT + MIB)
            pool.resize(limit=LIMIT)
            group.start_soon(pool.allocate_async, MIB)
            await anyio.sleep(0.1)
            for sizes in ([0], [], [0, 0]):
                assert (await pool.allocate_batch(sizes)).nbytes == 0
                assert (await pool.allocate_batch(iter(sizes), timeout=0)).nbytes == 0
            held.free()

    virtually(main)


# -- tasks, loops and threads ------------------------------------------------------------------------------------------


def test_many_who_wait_inside_of_blocks_are_served_at_once() -> None:
    """800 tasks of ten sizes: no turn of the loop takes long."""

    async def main() -> float:
        async with AsyncMemoryPool("host", **HOST) as pool:

            async def job(number: int) -> None:
                async with pool.allocate_async(100_000 * (number % 10 + 1)):
                    pass

            held = pool.allocate(LIMIT)
            tasks = [asyncio.create_task(job(number)) for number in range(800)]
            await asyncio.sleep(0.15)
            held.free()
            longest = 0.0
            while not all(task.done() for task in tasks):
                before = time.perf_counter()
                await asyncio.sleep(0)
                longest = max(longest, time.perf_counter() - before)
            return longest

    turns = (asyncio.run(main()) for _ in range(20))
    assert any(longest < 0.3 for longest in turns)  # a busy machine holds some of them up


def test_a_loop_that_has_moved_to_another_thread_is_woken() -> None:
    """A free on the thread where the loop ran before reaches the task that waits."""
    loop = asyncio.new_event_loop()
    pool = AsyncMemoryPool("host", **HOST)

    async def prepare() -> Any:
        await pool.open()
        held = await pool.allocate_async(LIMIT)
        with pytest.raises(PoolTimeout):
            await pool.allocate_async(MIB, timeout=0.01)
        return held

    async def want() -> str:
        async with pool.allocate_async(MIB):
            return "served"

    held = loop.run_until_complete(prepare())
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    waiting = asyncio.run_coroutine_threadsafe(want(), loop)
    while not pool.stats().waiting:
        time.sleep(0.001)
    held.free()
    assert waiting.result(60) == "served"
    asyncio.run_coroutine_threadsafe(pool.aclose(), loop).result(60)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # that is where the error goes
@pytest.mark.parametrize("error", [ValueError, asyncio.CancelledError])
def test_a_callback_that_raises_keeps_nobody_asleep(error: type[BaseException]) -> None:
    """Others that were granted in the same turn are woken after it."""

    def fail(_: object) -> None:
        raise error

    async def main() -> None:
        async with AsyncMemoryPool("host", **HOST) as pool:
            held = pool.allocate(LIMIT)
            requests = [pool.allocate_async(MIB) for _ in range(4)]
            requests[0].add_done_callback(fail)
            group = asyncio.gather(*requests)
            await asyncio.sleep(0)
            held.free()
            for buffer in await asyncio.wait_for(group, 60):
                buffer.free()

    asyncio.run(main())


def test_a_task_whose_loop_is_closed_is_given_no_memory() -> None:
    """The next loop's task gets it."""
    pool = AsyncMemoryPool("host", **HOST)
    loop = asyncio.new_event_loop()

    async def wait() -> None:
        await pool.allocate_async(LIMIT)

    async def first() -> Any:
        await pool.open()
        held = await pool.allocate_async(LIMIT)
        task = asyncio.ensure_future(wait())
        task._log_destroy_pending = False  # type: ignore[attr-defined]  # that is what this is about
        await asyncio.sleep(0.01)
        return held, task

    held, task = loop.run_until_complete(first())
    loop.close()

    async def second() -> None:
        held.free()
        (await pool.allocate_async(LIMIT, timeout=60)).free()
        await pool.aclose()

    asyncio.run(second())
    del task
    gc.collect()


@pytest.mark.parametrize("what", ["buffer", "lease"])
def test_what_a_dead_task_was_inside_of_is_freed_with_it(what: str) -> None:
    """A loop is closed under a task inside of a block, and the task is dropped."""
    pool = AsyncMemoryPool("host", **HOST)
    loop = asyncio.new_event_loop()

    async def job(inside: asyncio.Event) -> None:
        async with pool.allocate_async(MIB) if what == "buffer" else pool.lease(MIB):
            inside.set()
            await asyncio.Event().wait()

    async def start() -> None:
        await pool.open()
        inside = asyncio.Event()
        task = asyncio.ensure_future(job(inside))
        task._log_destroy_pending = False  # type: ignore[attr-defined]  # that is what this is about
        await inside.wait()

    loop.run_until_complete(start())
    loop.close()
    gc.collect()
    assert pool.stats().active_bytes == 0
    pool.close()


# -- no false alarms ---------------------------------------------------------------------------------------------------


def test_tasks_under_one_name_are_owners_of_their_own(virtually: Run) -> None:
    """One holds and will free, the other waits."""

    async def main() -> None:
        found = Outcomes()
        async with stepped_pool() as pool:
            with pool.owner("stage"):
                async with anyio.create_task_group() as group:
                    group.start_soon(found.after, "A", 0, pool, LIMIT // 2, 512)
                    group.start_soon(found.after, "B", 1, pool, LIMIT)
        assert (found.served, found.accused) == (["A", "B"], [])

    virtually(main)


def by_timer(_: AsyncMemoryPool, free: Callable[[], None]) -> None:
    asyncio.get_running_loop().call_later(0.2, free)


def by_thread(pool: AsyncMemoryPool, free: Callable[[], None]) -> None:
    def free_there() -> None:
        thread = threading.Thread(target=free)
        thread.start()
        thread.join()  # a busy machine may hold it up for longer than the pool waits

    by_timer(pool, free_there)


def by_resize(pool: AsyncMemoryPool, _: Callable[[], None]) -> None:
    asyncio.get_running_loop().call_later(0.2, lambda: pool.resize(limit=2 * LIMIT))


@pytest.mark.parametrize("how", [by_timer, by_thread, by_resize])
def test_who_waits_for_what_it_holds_itself_has_time_to_be_freed(
    how: Callable[[AsyncMemoryPool, Callable[[], None]], None],
) -> None:
    """A timer, a thread or a larger limit may come to its help."""

    async def main() -> None:
        async with AsyncMemoryPool("host", **HOST) as pool, pool.allocate_async(LIMIT // 2) as held:
            how(pool, held.free)
            (await pool.allocate_async(LIMIT)).free()

    asyncio.run(main())


def test_a_hook_that_waits_for_memory_is_refused() -> None:
    """`on_oom` that needs scratch memory may take what is free; where it asked for more, all would wait for it."""
    called: list[None] = []

    def hook(_: object) -> bool:
        free = pool.try_allocate(MIB)
        if free is not None:
            free.free()
        called.append(None)
        pool.allocate(4 * LIMIT)
        return False

    device = quick_device(8 * LIMIT)
    device.take_elsewhere(7 * LIMIT)
    pool = AsyncMemoryPool(device, limit=8 * LIMIT, segment_size=MIB, min_free=0, on_oom=hook)

    async def main() -> None:
        async with pool:
            refused, served = await asyncio.gather(
                pool.allocate_async(4 * LIMIT), taken_and_freed(pool.allocate_async(MIB)), return_exceptions=True
            )
            assert isinstance(refused, InvalidRequest)
            assert "on_oom" in str(refused)
            assert served == MIB

    async def taken_and_freed(request: Awaitable[Any]) -> int:
        with await request as buffer:
            return int(buffer.nbytes)

    asyncio.run(main())
    assert called
