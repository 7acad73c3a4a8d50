"""Memory that could move is held against nobody; uses that wait for each other are a deadlock."""

from __future__ import annotations

import asyncio

from asyncmem import DeadlockError, Spillable

from .spilling import HALF, LIMIT, Marks, make_pool, run, until
from .support import MIB


def test_idle_memory_is_held_against_nobody() -> None:
    """Two owners whose memory may move wait for more than is free: both are served."""

    async def main() -> None:
        async with make_pool() as pool, Marks(pool):
            started = asyncio.Event()

            async def work(number: int) -> None:
                with pool.owner(f"owner {number}"):
                    marked = pool.spillable(await pool.allocate_async(HALF))
                    await started.wait()
                    async with pool.allocate_async(LIMIT):
                        assert marked.spilled
                    marked.free()

            tasks = [asyncio.create_task(work(number)) for number in range(2)]
            await until(lambda: pool.stats().allocated_bytes == LIMIT)
            started.set()
            await asyncio.gather(*tasks)

    run(main)


def test_uses_that_wait_for_each_other_are_a_deadlock() -> None:
    """Each is in a block and wants what the other's memory has the room of: one is refused, the other goes on."""

    async def main() -> None:
        async with make_pool() as pool, Marks(pool) as marks:
            first, second = await marks(LIMIT // 2 + 512), await marks(LIMIT // 2 + 512)
            small = [await marks(MIB), await marks(MIB)]
            ends = []
            both = asyncio.Barrier(2)

            async def work(mine: Spillable, other: Spillable) -> None:
                try:
                    async with mine:
                        await both.wait()
                        async with other:
                            ends.append("served")
                except DeadlockError:
                    ends.append("refused")

            await asyncio.gather(work(small[0], first), work(small[1], second))
            assert ends == ["served", "served"]
            ends.clear()
            large = [await marks(LIMIT - MIB) for _ in range(2)]
            held = [await marks(MIB), await marks(MIB)]
            await asyncio.gather(work(held[0], large[0]), work(held[1], large[1]))
            assert sorted(ends) == ["refused", "served"]

    run(main)


def test_whoever_waits_for_another_to_bring_it_home_waits() -> None:
    """One holds what the other's request needs, and waits for that other: a circle, with one of them in the queue."""

    async def main() -> None:
        async with make_pool() as pool, Marks(pool) as marks:
            wanted = await marks(LIMIT)
            mine = await marks(MIB)
            ends: list[str] = []

            async def bring() -> None:
                try:
                    async with wanted:
                        ends.append("brought")
                except DeadlockError:
                    ends.append("refused")

            async def follow() -> None:
                try:
                    async with mine:
                        task.append(asyncio.create_task(bring()))
                        await until(lambda: pool.stats().waiting == 1)
                        async with wanted:
                            ends.append("served")
                except DeadlockError:
                    ends.append("follower refused")

            task: list[asyncio.Task[None]] = []
            async with mine:
                pass
            await follow()
            await task[0]
            assert ends == ["refused", "follower refused"]
            mine.free()
            async with wanted:
                pass

    run(main)
