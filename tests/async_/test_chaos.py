"""Hundreds of tasks that take, hold, free, cancel and time out at random leave a pool as they found it."""

import random
from collections import Counter

import anyio.lowlevel
import pytest

from asyncmem import AsyncMemoryPool, PoolTimeout
from asyncmem.core import Buffer
from tests.conservation import refillable, whole

from .loops import Run, on_trio, plain, uv
from .support import MIB, make_pool, quick_device, stepped_pool, turns

TASKS = 200
LARGEST = 256 * 1024
HELD = 4
LIMIT = TASKS * HELD * LARGEST // 2 // 10 // MIB * MIB  # a tenth of what they would hold on average


class Chaos:
    """One run: what each task does is drawn from its own seed."""

    def __init__(self, pool: AsyncMemoryPool, steps: int) -> None:
        self.pool = pool
        self.steps = steps
        self.finished = 0
        self.granted: Counter[int] = Counter()

    async def play(self, number: int) -> None:
        random_ = random.Random(number)
        held: list[Buffer] = []
        for _ in range(self.steps):
            await self.step(number, random_, held)
        for buffer in held:
            buffer.free()
        self.finished += 1

    async def step(self, number: int, random_: random.Random, held: list[Buffer]) -> None:
        dice = random_.random()
        if held and (dice < 0.4 or len(held) >= HELD):
            held.pop(random_.randrange(len(held))).free()
        elif dice < 0.7:
            await self.take(number, random_, held)
        elif dice < 0.8:
            with anyio.move_on_after(random_.random() * 0.001):
                await self.take(number, random_, held)
        elif dice < 0.85:
            request = self.pool.allocate_async(random_.randrange(1, LARGEST))
            request.cancel()
        elif dice < 0.9:
            self.pool.allocate_async(random_.randrange(1, LARGEST))
        else:
            await anyio.lowlevel.checkpoint()

    async def take(self, number: int, random_: random.Random, held: list[Buffer]) -> None:
        try:
            buffer = await self.pool.allocate_async(random_.randrange(1, LARGEST), timeout=random_.random() * 0.01)
        except PoolTimeout:
            # Whoever holds much and gets nothing lets go of it, or they would all wait for each other.
            held.clear()
        else:
            held.append(buffer)
            self.granted[number] += 1


@pytest.mark.hazard("H1", "H6", "H10")
@pytest.mark.parametrize(("run", "steps"), [(plain, 300), (uv, 150), (on_trio, 150)], ids=["plain", "uv", "on_trio"])
def test_chaos_conserves_every_byte(run: Run, steps: int) -> None:
    """200 tasks that take random steps over a tenth of their demand end with nothing held, and none of them starved."""

    async def main() -> None:
        async with make_pool(LIMIT, segment_size=8 * MIB) as pool:
            chaos = Chaos(pool, steps)
            async with anyio.create_task_group() as group:
                for number in range(TASKS):
                    group.start_soon(chaos.play, number)
            stats = pool.stats()
            assert chaos.finished == TASKS
            assert len(chaos.granted) == TASKS
            assert stats.waits > 1_000
            whole(pool)
            await refillable(pool, LIMIT)

    run(main)


@pytest.mark.parametrize(("seed", "segments"), [(0, "auto"), (1, "auto"), (2, "auto"), (3, "paged")])
def test_chaos_with_a_manager_conserves_every_byte(virtually: Run, seed: int, segments: str) -> None:
    """The same under virtual time, while the pool is resized, trimmed and looked through."""

    async def main() -> None:
        device = quick_device(8 * MIB)
        async with stepped_pool(4 * MIB, device=device, segment_size=2 * MIB, segments=segments) as pool:
            chaos = Chaos(pool, 200)
            random_ = random.Random(seed)
            rounds = 0

            async def manage() -> None:
                nonlocal rounds
                while chaos.finished < 20 and rounds < 40:
                    await turns(random_.randrange(1, 10))
                    rounds += 1
                    pool.resize(limit=random_.randrange(2, 5) * 2 * MIB)
                    await pool.trim()
                    pool.empty_cache()
                    pool.check()

            async with anyio.create_task_group() as group:
                group.start_soon(manage)
                for number in range(20):
                    group.start_soon(chaos.play, seed * 1_000 + number)
            assert rounds >= 5
            pool.resize(limit=8 * MIB)
            whole(pool)
            await refillable(pool, 8 * MIB)

    virtually(main)
