"""A pipeline that keeps three times as much as its device may have, and comes to the same results.

Each block of a signal is transformed and kept for later, as activations are for a backward pass: 24 MiB in a pool of 8.
Kept blocks are spillable, so blocks that are not in use move to page-locked memory of the host while new ones are made,
and come back one after the other, last first. With room for everything nothing moves, and it is faster.

It runs on the host; ``main("cuda:0")`` does the same on a GPU.
"""

import time
from typing import Any

import numpy as np

import asyncmem
from asyncmem.pipeline import Pipeline, StageShare

BLOCKS, NUMBERS = 24, 1 << 18
SIZE = 4 * NUMBERS
SMALL, AMPLE = 8 * SIZE, 32 * SIZE

Where = str | asyncmem.devices.Device
Floats = np.ndarray[Any, np.dtype[np.float32]]


def block(number: int) -> Floats:
    """Make up a block of the signal."""
    return np.random.default_rng(number).standard_normal(NUMBERS, np.float32)


class Store:
    """Blocks that outlive their way through a pipeline; so their memory is the pool's own, and no stage's share."""

    def __init__(self, pool: asyncmem.AsyncMemoryPool) -> None:
        self.pool = pool

    async def keep(self, number: int, _: StageShare) -> asyncmem.Spillable:
        """Put a block into the device's memory, and say that it may move from there."""
        buffer = await self.pool.allocate_async(SIZE, tag=f"block {number}")
        await buffer.copy_from(block(number))
        return self.pool.spillable(buffer)

    async def recall(self, kept: asyncmem.Spillable, _: StageShare) -> float:
        """Keep a block on the device while its numbers are read."""
        numbers = np.empty(NUMBERS, np.float32)
        async with kept as buffer:
            await buffer.copy_to(numbers)
        kept.free()
        return float(np.square(numbers).sum(dtype=np.float64))


async def there_and_back(device: Where, limit: int) -> tuple[list[float], asyncmem.PoolStats, float]:
    """Keep all blocks, then go through them from the last to the first."""
    async with asyncmem.AsyncMemoryPool(device, limit=limit, segment_size=SIZE) as pool:
        store, start = Store(pool), time.perf_counter()
        async with Pipeline(store.keep, pool=pool) as forward:
            kept = [one async for one in forward.map(range(BLOCKS))]
        async with Pipeline(store.recall, pool=pool) as backward:
            energies = [energy async for energy in backward.map(reversed(kept))]
        stats = pool.stats()
        assert stats.allocated_bytes == stats.spilled_bytes == 0
        return energies, stats, time.perf_counter() - start


async def main(device: Where = "host") -> None:
    """Do it in little memory and in ample, and compare with plain numpy."""
    energies, small, longer = await there_and_back(device, SMALL)
    same, ample, shorter = await there_and_back(device, AMPLE)
    assert energies == same == [float(np.square(block(at)).sum(dtype=np.float64)) for at in reversed(range(BLOCKS))]
    assert small.peak_reserved <= SMALL
    assert small.spills >= BLOCKS - SMALL // SIZE
    assert ample.spills == 0
    print(f"{BLOCKS} blocks of {SIZE >> 20} MiB were kept in {SMALL >> 20} MiB of {device}:")
    print(f"{small.spills} moved out and {small.returns} back, in {1e3 * longer:.0f} ms; {1e3 * shorter:.0f} with room")
    print("the results are those of plain numpy, bit for bit")


if __name__ == "__main__":
    asyncmem.run(main())
