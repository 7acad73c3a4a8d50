"""A model of a lease whose memory may move: who is served, and what is in it."""

from __future__ import annotations

import asyncio
import random

import numpy as np
import pytest

from asyncmem import AsyncMemoryPool, Lease, OutOfMemoryError, Spillable
from asyncmem.core import Buffer
from asyncmem.pool import worker

from .spilling import HALF, LIMIT, fill, holds, make_pool, run
from .support import MIB, quick_device

PLACES = 4
STEPS = 200


class Model:
    """A program in a lease of a few blocks of one size, and what it holds.

    Args:
        pool: The lease's.
        lease: Where all is allocated.
        seed: The program.
        awaited: Whether it awaits, or calls.
    """

    def __init__(self, pool: AsyncMemoryPool, lease: Lease, seed: int, *, awaited: bool) -> None:
        self.pool = pool
        self.lease = lease
        self.awaited = awaited
        self.draw = random.Random(seed)
        self.held: list[Buffer] = []
        self.idle: dict[Spillable, int] = {}
        self.used: dict[Spillable, int] = {}
        self.refused = 0

    @property
    def full(self) -> bool:
        """Whether all blocks hold what cannot move."""
        return len(self.held) + len(self.used) == PLACES

    async def run(self) -> None:
        """Play: where it calls instead of awaiting, on a thread without a loop, which may wait for what is moving."""
        if self.awaited:
            await self.play()
        else:
            assert await asyncio.to_thread(list, self.play().__await__()) == []  # it never waits for a loop

    async def play(self) -> None:
        """Do random things, and free everything."""
        actions = [self.take, self.free, self.mark, self.use, self.use, self.leave, self.drop]
        for _ in range(STEPS):
            await self.draw.choice(actions)()
        while self.used:
            await self.leave()
        while self.idle:
            await self.drop()
        while self.held:
            await self.free()

    async def take(self) -> None:
        """Allocate, which fails exactly where nothing could move."""
        try:
            buffer = await self.lease.allocate_async(MIB) if self.awaited else self.lease.allocate(MIB)
        except OutOfMemoryError:
            assert self.full
            self.refused += 1
        else:
            assert not self.full
            fill(buffer, self.draw.randrange(256))
            self.held.append(buffer)

    async def use(self) -> None:
        """Bring one home, which fails likewise, and look at it."""
        if not self.idle:
            return
        one = self.draw.choice([*self.idle])
        there = not one.spilled
        try:
            buffer = await one.__aenter__() if self.awaited else one.__enter__()
        except OutOfMemoryError:
            assert self.full
            self.refused += 1
        else:
            assert there or not self.full
            value = self.used[one] = self.idle.pop(one)
            assert holds(buffer, value)

    async def mark(self) -> None:
        if self.held:
            buffer = self.held.pop(0)
            value = int(np.asarray(buffer)[0])
            self.idle[self.pool.spillable(buffer)] = value

    async def leave(self) -> None:
        if self.used:
            one, value = self.used.popitem()
            one.__exit__(None, None, None)
            self.idle[one] = value

    async def drop(self) -> None:
        if self.idle:
            one = self.draw.choice([*self.idle])
            del self.idle[one]
            one.free()

    async def free(self) -> None:
        if self.held:
            self.held.pop().free()


@pytest.mark.may_block  # half of them call instead of awaiting
@pytest.mark.parametrize("awaited", [True, False])
@pytest.mark.parametrize("seed", range(4))
def test_lease_serves_until_too_much_is_in_use(seed: int, *, awaited: bool) -> None:
    """Whatever else it keeps: then it refuses, and at once; and all that comes home is as it was."""

    async def main() -> None:
        async with make_pool(quick_device(backing=True)) as pool, pool.lease(PLACES * MIB) as lease:
            model = Model(pool, lease, seed, awaited=awaited)
            await model.run()
            assert model.refused > 0
            assert pool.stats().spills > 0
            assert lease.stats().allocated_bytes == 0
            pool.check()

    run(main)


def test_a_lease_of_plain_memory_makes_no_notes_on_spillable_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the main thread interrupts are held meanwhile, which takes as long as a lease."""

    def refuse(_call: object) -> None:
        raise AssertionError("interrupts are held")

    with AsyncMemoryPool("host", limit=LIMIT) as pool:
        pool.allocate(512).free()
        monkeypatch.setattr(worker, "hold_interrupts", refuse)
        with pool.lease(HALF) as lease, lease.budget("part", limit=HALF):
            lease.allocate(512).free()
        monkeypatch.undo()
