"""Random programs over marked memory, on the devices that need no GPU; the fake driver plays them in `tests/cuda`."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from asyncmem import AsyncMemoryPool, Spillable
from asyncmem.core import Buffer
from asyncmem.devices import Host, Latencies, Simulated
from tests.conservation import whole
from tests.metal.session import open_metal
from tests.processor import open_processor

from .spill_program import PATIENCE, Program

LIMIT = 1 << 20


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", ["host", "backed", "ordered", "opencl", "metal"])
def test_every_read_sees_what_was_written_there(request: pytest.FixtureRequest, name: str, seed: int) -> None:
    """Over real memory each read has its own bytes; over none the checker sees that all work was in order."""
    device = {
        "host": Host,
        "backed": lambda: Simulated(backing=True, latencies=Latencies.zero()),
        "ordered": Simulated,
        "opencl": open_processor,
        "metal": lambda: open_metal(request),
    }[name]()
    if isinstance(device, Simulated):
        device.suggest_capacity(8 * LIMIT)

    async def main() -> None:
        streams = [device.default_stream, device.create_stream(), device.create_stream()]
        async with AsyncMemoryPool(device, limit=LIMIT, segment_size=LIMIT, small_limit=512, min_free=0) as pool:
            program = Program(pool, list(streams), seed, reads=name != "ordered")
            await program.run()
            assert program.checks > 50

    asyncio.run(main())
    device.close()


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", ["backed", "ordered"])
def test_so_it_does_where_budgets_are_full(name: str, seed: int) -> None:
    """One in another, and one beside them; the pool has room for all three, or a little less in every other program."""
    device = Simulated(backing=name == "backed", latencies=Latencies.zero())

    async def main() -> None:
        streams = [device.default_stream, device.create_stream()]
        limit = 3 * LIMIT - LIMIT // 2 * (seed % 2)
        async with AsyncMemoryPool(device, limit=limit, segment_size=LIMIT, small_limit=512, min_free=0) as pool:
            outer = pool.budget("outer", limit=LIMIT + LIMIT // 2)
            shares = [outer.budget("inner", limit=LIMIT), outer, pool.budget("beside", limit=LIMIT)]
            program = Program(pool, list(streams), seed, reads=name == "backed", shares=shares)
            await program.run(steps=40)
            assert program.checks > 50

    asyncio.run(main())
    device.close()


LAYERS, BATCHES, WIDTH = 8, 3, 128
ACTIVATION = LIMIT // LAYERS
ROWS = ACTIVATION // 8 // WIDTH


def layer(number: int) -> np.ndarray:
    """The weights of one layer, the same each time."""
    return np.random.default_rng(number).standard_normal((WIDTH, WIDTH)) / WIDTH**0.5


def start(batch: int) -> np.ndarray:
    """What goes in."""
    return np.random.default_rng(1000 + batch).standard_normal((ROWS, WIDTH))


def gradient(activation: np.ndarray, upstream: np.ndarray, number: int) -> tuple[np.ndarray, np.ndarray]:
    """One layer's step back: the gradients of its weights and of its input."""
    return activation.T @ upstream, upstream @ layer(number).T


def plain(batch: int) -> list[np.ndarray]:
    """Forward and back with all activations in memory."""
    activations = [start(batch)]
    for number in range(LAYERS):
        activations.append(activations[-1] @ layer(number))
    upstream, found = activations.pop(), []
    for number in reversed(range(LAYERS)):
        weights, upstream = gradient(activations.pop(), upstream, number)
        found.append(weights)
    return found


def matrix(buffer: Buffer) -> np.ndarray:
    """The memory of an activation as numpy sees it; for the time of one expression."""
    return np.asarray(buffer).view(np.float64).reshape(ROWS, WIDTH)


async def train(pool: AsyncMemoryPool, batch: int, forward: asyncio.Barrier) -> list[np.ndarray]:
    """The same with activations in the pool, each of which may move once it is written."""

    async def keep(value: np.ndarray) -> Spillable:
        buffer = await pool.allocate_async(ACTIVATION, tag=f"batch {batch}")
        matrix(buffer)[:] = value
        return pool.spillable(buffer)

    activations = [await keep(start(batch))]
    for number in range(LAYERS):
        async with activations[-1] as buffer:
            value = matrix(buffer) @ layer(number)
        activations.append(await keep(value))
    await forward.wait()
    async with activations.pop() as buffer:
        upstream = matrix(buffer).copy()
    found = []
    for number in reversed(range(LAYERS)):
        held = activations.pop()
        async with held as buffer:
            weights, upstream = gradient(matrix(buffer), upstream, number)
        held.free()
        found.append(weights)
    return found


def test_three_times_the_limit_give_the_same_result() -> None:
    """All micro-batches go forward before any goes back, with activations that do not fit: bit for bit as without."""

    async def main() -> None:
        async with AsyncMemoryPool("host", limit=LIMIT, segment_size=LIMIT) as pool:
            forward = asyncio.Barrier(BATCHES)
            async with asyncio.timeout(PATIENCE):
                found = await asyncio.gather(*(train(pool, batch, forward) for batch in range(BATCHES)))
            for batch in range(BATCHES):
                for mine, theirs in zip(found[batch], plain(batch), strict=True):
                    assert np.array_equal(mine, theirs)
            stats = pool.stats()
            assert stats.spills >= BATCHES * (LAYERS + 1) - LIMIT // ACTIVATION
            assert stats.peak_reserved <= LIMIT
            whole(pool)

    asyncio.run(main())
