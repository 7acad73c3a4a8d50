"""Stages whose items need three times what their share has, because marked memory moves to the host meanwhile."""

from __future__ import annotations

import anyio
import numpy as np
import pytest

from asyncmem import AsyncMemoryPool, Spillable
from asyncmem.pipeline import Pipeline, StageShare, stage
from tests.conservation import whole

PART = 1 << 14  # bytes
CREDIT = 4 * PART
PARTS = 3 * CREDIT // PART
ITEMS = 12


def values(item: int, part: int) -> np.ndarray:
    """What is written to one part of an item's memory."""
    return np.random.default_rng([item, part]).standard_normal(PART // 8)


def plain(item: int) -> float:
    """The result without a pipeline."""
    return float(sum((values(item, part) ** 2).sum() for part in range(PARTS)))


async def write(item: int, pool: StageShare) -> list[Spillable]:
    """Write more than the share has, each part of which may move once it is written."""
    parts = []
    for part in range(PARTS):
        buffer = await pool.allocate_async(PART)
        np.asarray(buffer).view(np.float64)[:] = values(item, part)
        parts.append(pool.spillable(buffer))
    return parts


async def read(parts: list[Spillable]) -> float:
    """Read all of it, in turn, and free it."""
    total = 0.0
    for one in parts:
        async with one as buffer:
            total += float((np.asarray(buffer).view(np.float64) ** 2).sum())
        one.free()
    return total


async def keep_all(item: int, pool: StageShare) -> float:
    """Write and read in one stage."""
    return await read(await write(item, pool))


async def read_in_turn(parts: list[Spillable], pool: StageShare) -> float:  # noqa: ARG001 - it needs no memory
    """Read in a stage of its own what the one before has written."""
    return await read(parts)


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
@pytest.mark.parametrize("stages", ["one", "two"])
@pytest.mark.parametrize("terms", ["credit", "shared"])
def test_three_times_the_credit_give_the_same_result(backend: str, stages: str, terms: str) -> None:
    """Within the credit of an item, or the share of a stage that has none; also where what moved is passed on."""
    credit = CREDIT if terms == "credit" else None
    functions = [keep_all] if stages == "one" else [write, read_in_turn]
    made = [stage(credit=credit, workers=2)(functions[0]), *map(stage(), functions[1:])]
    limit = (4 * CREDIT if credit else CREDIT) + len(functions) * PART

    async def main() -> None:
        async with AsyncMemoryPool("host", limit=limit, segment_size=limit) as pool:
            with anyio.fail_after(60):
                async with Pipeline(*made, pool=pool) as pipe:
                    found = [total async for total in pipe.map(range(ITEMS))]
            assert found == [plain(item) for item in range(ITEMS)]
            assert pool.stats().spills > 0
            assert pool.stats().peak_allocated <= limit
            whole(pool)
            whole(pool._host_pool("spilled"))

    anyio.run(main, backend=backend)
