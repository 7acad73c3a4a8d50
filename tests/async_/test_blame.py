"""Errors and warnings about waiting name the level that has no room, who holds it, and the line of the program."""

from __future__ import annotations

import asyncio
import sys
import threading
import warnings
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import trio

from asyncmem import (
    AsyncMemoryPool,
    Budget,
    DeadlockError,
    LeakWarning,
    OutOfMemoryError,
    PoolTimeout,
    StallWarning,
)
from asyncmem.insight import AllocationTracker, Recording

from .support import MIB

LIMIT = 16 * MIB


def here(ahead: int = 0) -> int:
    """The line of the caller, or one so far below it."""
    return sys._getframe(1).f_lineno + ahead


def host_pool(**options: Any) -> AsyncMemoryPool:
    """A pool of ordinary memory with a real worker."""
    return AsyncMemoryPool("host", limit=LIMIT, segment_size=LIMIT, name="p", **options)


async def stalled(*tasks: asyncio.Task[Any], begin: Callable[[], object] = int) -> warnings.WarningMessage:
    """Begin, wait for the warning, and cancel the tasks that it is about."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        begin()
        while not caught:  # noqa: ASYNC110  # the worker warns
            await asyncio.sleep(0.05)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert caught[0].category is StallWarning
    return caught[0]


# -- stalls ------------------------------------------------------------------------------------------------------------


def test_a_stall_names_each_level_who_holds_it_and_where_tasks_wait() -> None:
    """Granted requests that nobody awaited, pins, exports, spillable buffers and blocks of others are told apart."""
    lines: list[int] = []

    async def main() -> str:
        async with host_pool(stall_after=0.1) as pool:
            await pool.warmup([(LIMIT, 1)])
            budget = pool.budget("b", limit=8 * MIB)
            forgotten = budget.allocate_async(5 * MIB, tag="forgotten")
            pin = (pinned := pool.allocate(MIB)).pin()
            seen = memoryview(exported := pool.allocate(MIB))
            exported.free()
            spillable = pool.spillable(pool.allocate(2 * MIB))
            leave = asyncio.Event()

            async def hold() -> None:
                async with pool.allocate_async(2 * MIB, tag="held"):
                    await leave.wait()

            async def within() -> None:
                async with pool.allocate_async(512), budget.allocate_async(4 * MIB):
                    pass

            async def outside() -> None:
                lines.append(here(1))
                await pool.allocate_async(15 * MIB)

            holder = asyncio.create_task(hold(), name="holder")
            await asyncio.sleep(0)
            waiting = [asyncio.create_task(within(), name="within"), asyncio.create_task(outside(), name="outside")]
            found = await stalled(*waiting)
            leave.set()
            await holder
            del forgotten, pin, pinned, seen, spillable
            assert found.filename == __file__
            assert found.lineno in {lines[0], lines[0] - 5}
            return str(found.message)

    text = asyncio.run(main())
    within, outside = (next(row for row in text.splitlines() if name in row) for name in ("within", "outside"))
    assert within.split()[2:7] == ["512", "B", "4", "MiB", within.split()[6]]
    assert within.endswith(f"{__file__}:{lines[0] - 5}")
    assert outside.endswith(f"{__file__}:{lines[0]}")
    assert (
        "budget 'b': limit 8 MiB, live 5 MiB ('forgotten' 5 MiB)\n  5 MiB held in no block, or granted and never"
        in text
    )
    assert "pool 'p': limit 16 MiB, live 11.00 MiB ('forgotten' 5 MiB, 'held' 2 MiB)" in text
    for row in ("2 MiB task holder", "1 MiB pinned", "1 MiB freed while exported", "2 MiB spillable, and in no use"):
        assert f"  {row}" in text.splitlines()
    assert "  5 MiB held in no block, or granted and never awaited" in text.splitlines()


def test_a_stall_names_what_has_moved_to_the_host() -> None:
    """Spilled memory takes no room, and is named beside what does."""

    async def main() -> str:
        async with host_pool(stall_after=0.1) as pool:
            spillable = pool.spillable(pool.allocate(12 * MIB))
            kept = await pool.allocate_async(12 * MIB)
            assert spillable.spilled
            found = await stalled(asyncio.ensure_future(pool.allocate_async(12 * MIB)))
            spillable.free()
            del kept
            return str(found.message)

    assert "  12 MiB more, spilled to the host" in asyncio.run(main()).splitlines()


def test_a_stall_names_the_line_of_a_thread_that_waits() -> None:
    """A thread is an owner like a task."""
    lines: list[int] = []

    async def main() -> warnings.WarningMessage:
        async with host_pool(stall_after=0.1) as pool:
            kept = pool.allocate(LIMIT)

            def work() -> None:
                lines.append(here(1))
                pool.allocate(MIB, timeout=60).free()

            thread = threading.Thread(target=work, name="loader")
            found = await stalled(begin=thread.start)
            kept.free()
            await asyncio.to_thread(thread.join)
            return found

    found = asyncio.run(main())
    assert (found.filename, found.lineno) == (__file__, lines[0])
    assert "thread loader" in str(found.message)


def test_a_stall_names_the_line_of_a_task_of_trio() -> None:
    """Trio's tasks are looked into like asyncio's."""
    lines: list[int] = []

    async def main() -> None:
        async with host_pool(stall_after=0.1) as pool:
            kept = pool.allocate(LIMIT)

            async def work() -> None:
                lines.append(here(1))
                await pool.allocate_async(MIB)

            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(work)
                    while not caught:  # noqa: ASYNC110  # the worker warns
                        await trio.sleep(0.05)
                    kept.free()
            assert (caught[0].filename, caught[0].lineno) == (__file__, lines[0])

    trio.run(main)


# -- leaks -------------------------------------------------------------------------------------------------------------


async def by_async_with(pool: AsyncMemoryPool) -> tuple[object, int]:
    line = here(1)
    async with pool:
        return pool.allocate(MIB), line


async def by_aclose(pool: AsyncMemoryPool) -> tuple[object, int]:
    kept = pool.allocate(MIB)
    line = here(1)
    await pool.aclose()
    return kept, line


async def by_with(pool: AsyncMemoryPool) -> tuple[object, int]:
    line = here(1)
    with pool:
        return pool.allocate(MIB), line


async def by_a_recorded_pool(pool: AsyncMemoryPool) -> tuple[object, int]:
    await pool.open()
    async with Recording(pool):
        line = here(1)
        kept = pool.allocate(MIB)
        await pool.aclose()
    return kept, line


async def by_a_tracker(pool: AsyncMemoryPool) -> tuple[object, int]:
    kept = []
    async with pool:
        with AllocationTracker(pool):
            line = here(1)
            kept.append(pool.allocate(MIB))
        kept.pop().free()
    return kept, line


@pytest.mark.parametrize("close", [by_async_with, by_aclose, by_with, by_a_recorded_pool, by_a_tracker])
def test_a_leak_points_at_the_program(close: Callable[[AsyncMemoryPool], Awaitable[tuple[object, int]]]) -> None:
    """At the line that made the buffer where that is known, else at the one that closed the pool."""

    async def main() -> None:
        pool = host_pool()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            kept, line = await close(pool)
        assert [(one.category, one.filename, one.lineno) for one in caught] == [(LeakWarning, __file__, line)]
        del kept

    asyncio.run(main())


def test_a_leak_names_what_is_held_and_how() -> None:
    """By tag, by whoever is inside of a block, and the rest."""

    async def main() -> None:
        pool = await host_pool().__aenter__()
        kept, pinned = pool.allocate(2 * MIB, tag="kept"), pool.allocate(MIB)
        with pool.allocate(MIB), pinned.pin(), pytest.warns(LeakWarning) as caught:
            await pool.aclose()
        text = str(caught[0].message)
        assert "buffers of 4 MiB were held ('kept' 2 MiB)" in text
        assert "1 MiB task main, 1 MiB pinned, 2 MiB held in no block, or granted and never awaited" in text
        del kept

    async def named() -> None:
        await asyncio.create_task(main(), name="main")

    asyncio.run(named())


# -- errors ------------------------------------------------------------------------------------------------------------


async def take_two(share: AsyncMemoryPool | Budget, first: int, second: int) -> DeadlockError | None:
    try:
        async with share.allocate_async(first, tag="first"):
            await asyncio.sleep(0.01)
            async with share.allocate_async(second):
                pass
    except DeadlockError as error:
        return error
    return None


TWO = take_two.__code__.co_firstlineno + 4


async def take_one(share: AsyncMemoryPool | Budget, nbytes: int) -> None:
    async with share.allocate_async(nbytes):
        pass


@pytest.mark.parametrize("within", ["pool", "budget"])
def test_a_deadlock_names_level_lines_and_holders_and_advises_who_holds_something(within: str) -> None:
    """The one who holds nothing is named, since it is stuck too, and gets no advice."""

    async def main() -> DeadlockError:
        async with host_pool() as pool:
            share: Any = pool.budget("b", limit=8 * MIB) if within == "budget" else pool
            half = share._own_limit() // 2
            kept = pool.allocate(MIB) if within == "budget" else None
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(take_two(share, half, half), name=f"two {i}") for i in range(2)]
                group.create_task(take_one(share, 2 * half), name="one")
            del kept
            (error,) = filter(None, [task.result() for task in tasks])
            return error

    error = asyncio.run(main())
    size = "8 MiB" if within == "budget" else "16 MiB"
    name = "budget 'b'" if within == "budget" else "pool 'p'"
    assert error.pool == "p"
    assert error.level == name
    assert str(error).startswith(f"deadlock in {name}: 3 owners")
    assert f"{name}: limit {size}, live {size} ('first' {size})" in str(error).splitlines()
    assert {one.site for one in error.owners if one.held} == {f"{__file__}:{TWO}"}
    assert error.hints[0].startswith("task two")
    assert error.hints[0].endswith(f"a lease of {size}")


def test_a_deadlock_advises_nothing_that_is_above_the_limit() -> None:
    """Who needs more than there may be cannot take it at once."""

    async def main() -> DeadlockError:
        async with host_pool() as pool:
            found = await asyncio.gather(*(take_two(pool, LIMIT // 2, LIMIT - MIB) for _ in range(2)))
            return next(filter(None, found))

    assert asyncio.run(main()).hints == ("a larger limit", "fewer of these tasks at a time")


def test_a_timeout_names_the_level_that_has_no_room() -> None:
    """A budget's own free bytes, where it is the budget that is full."""

    async def main() -> None:
        async with host_pool() as pool:
            budget = pool.budget("b", limit=8 * MIB)
            inner = budget.budget("inner", limit=4 * MIB)
            kept = [budget.allocate(5 * MIB), pool.allocate(MIB)]
            for share, nbytes, level, free in (
                (inner, 4 * MIB, "budget 'b'", 3 * MIB),
                (budget, 4 * MIB, "budget 'b'", 3 * MIB),
                (pool, 11 * MIB, "pool 'p'", 10 * MIB),
            ):
                with pytest.raises(PoolTimeout, match=f"^{level} had no") as caught:
                    await share.allocate_async(nbytes, timeout=0.01)
                assert (caught.value.level, caught.value.free) == (level, free)
            del kept

    asyncio.run(main())


def test_out_of_memory_has_the_figures_of_the_level_that_refused() -> None:
    """A lease and a budget inside of it tell their own tags, sizes and advice, and nothing of the pool's."""

    async def main() -> None:
        async with host_pool() as pool, pool.lease(8 * MIB) as lease:
            inside = lease.budget("inside", limit=4 * MIB)
            kept = [
                pool.allocate(MIB, tag="outside"),
                lease.allocate(2 * MIB, tag="lease's"),
                inside.allocate(3 * MIB, tag="own"),
            ]
            with pytest.raises(OutOfMemoryError) as of_budget:
                inside.allocate(2 * MIB)
            with pytest.raises(OutOfMemoryError) as of_lease:
                lease.allocate(4 * MIB)
            del kept
        facts = of_budget.value.facts
        assert (facts.level, facts.limit, facts.live, facts.cause) == ("budget 'inside'", 4 * MIB, 3 * MIB, "limit")
        assert facts.holders == (("own", 3 * MIB),)
        assert facts.advice == ("free what budget 'inside' holds", "raise its limit")
        facts = of_lease.value.facts
        assert (facts.level, facts.limit, facts.live, facts.cause) == ("a lease of 8 MiB", 8 * MIB, 5 * MIB, "limit")
        assert facts.holders == (("own", 3 * MIB), ("lease's", 2 * MIB))
        assert (facts.pending_fence_bytes, facts.device_free, facts.remedies, facts.sites) == (0, None, {}, ())

    asyncio.run(main())


def test_growth_that_an_event_loop_cannot_wait_for_is_named() -> None:
    """The device has more to give, and others get it just now: awaiting the request would help."""

    async def main() -> None:
        async with host_pool() as pool:
            opened = threading.Event()
            device = pool._opened.device
            allocate_segment = device.allocate_segment
            device.allocate_segment = lambda *asked: opened.wait(60) and allocate_segment(*asked)  # type: ignore[method-assign]
            growing = pool.allocate_async(MIB)
            with pytest.raises(OutOfMemoryError, match="being made for other requests") as caught:
                pool.allocate(MIB)
            assert caught.value.cause == "growth"
            assert caught.value.advice[0] == "await allocate_async, which waits for it"
            opened.set()
            await growing

    asyncio.run(main())
