"""Levels of pressure change with what is live, and do not flutter at a border."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import anyio.lowlevel
import pytest

from asyncmem import AsyncMemoryPool, Pressure

from .loops import Run
from .support import MIB, stepped_pool

LIMIT = 100 * MIB
STEPS = 200


@asynccontextmanager
async def heard(pool: AsyncMemoryPool) -> AsyncIterator[list[Pressure]]:
    """The levels that a reader hears of, up to a while after the block."""
    levels: list[Pressure] = []

    async def listen() -> None:
        async for level in pool.pressure_changes():
            levels.append(level)  # noqa: PERF401  # others read it meanwhile

    async with anyio.create_task_group() as group:
        group.start_soon(listen)
        await anyio.lowlevel.checkpoint()
        yield levels
        await anyio.sleep(1)
        group.cancel_scope.cancel()


@pytest.mark.parametrize(
    ("less", "seconds"),
    [(2, 0.5), (2, 0.0), (30, 0.05), (30, 0.0)],
    ids=["narrow and slow", "narrow and quick", "wide and short", "wide and quick"],
)
def test_steps_around_a_border_are_few_changes(virtually: Run, less: int, seconds: float) -> None:
    """A level ends a good piece below where it began, and a lower one is told once it has lasted."""

    async def main() -> None:
        async with stepped_pool(LIMIT) as pool, heard(pool) as levels:
            base = await pool.allocate_async((81 - less) * MIB)
            for _ in range(STEPS):
                buffer = await pool.allocate_async(less * MIB)
                await anyio.sleep(seconds)
                buffer.free()
                await anyio.sleep(seconds)
            assert levels == ([Pressure.MEDIUM, Pressure.HIGH] if less < 20 else [Pressure.HIGH])
            base.free()
        assert levels[-1] is Pressure.LOW

    virtually(main)


def test_levels_that_last_are_told_each(virtually: Run) -> None:
    """Steps that are wide and long are changes."""

    async def main() -> None:
        async with stepped_pool(LIMIT) as pool, heard(pool) as levels:
            base = await pool.allocate_async(50 * MIB)
            for _ in range(3):
                buffer = await pool.allocate_async(31 * MIB)
                await anyio.sleep(0.2)
                buffer.free()
                await anyio.sleep(0.2)
            base.free()
        assert levels == [Pressure.HIGH, Pressure.LOW] * 3

    virtually(main)


def test_a_reader_that_comes_late_has_little_to_hear(virtually: Run) -> None:
    """What has changed back meanwhile is forgotten, however often that was."""

    async def main() -> None:
        async with stepped_pool(LIMIT) as pool:
            changes = pool.pressure_changes()
            for _ in range(STEPS):
                (await pool.allocate_async(81 * MIB)).free()
            base = await pool.allocate_async(97 * MIB)
            assert [await anext(changes), await anext(changes)] == [Pressure.HIGH, Pressure.CRITICAL]
            base.free()

    virtually(main)
