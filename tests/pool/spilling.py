"""Pools that two halves fill, and marked buffers of them that leave nothing behind."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Self

import numpy as np
import pytest

from asyncmem import AsyncMemoryPool, Spillable
from asyncmem.core import Buffer
from asyncmem.devices import Simulated
from asyncmem.testing import SteppedPool
from tests.conservation import whole

from .support import MIB, quick_device

HALF = 4 * MIB
LIMIT = 2 * HALF
LONG = 50  # seconds that nothing here takes


stepped = pytest.mark.may_block  # the worker's calls are steps of the loop


def make_pool(
    device: Simulated | None = None, kind: type[AsyncMemoryPool] = AsyncMemoryPool, **options: object
) -> AsyncMemoryPool:
    """A pool that two halves fill."""
    settings: dict[str, object] = {"limit": LIMIT, "segment_size": HALF, "stall_after": None, **options}
    return kind(device or quick_device(), **settings)  # type: ignore[arg-type]  # what tests pass


def stepped_pool(**options: object) -> AsyncMemoryPool:
    """The same with a worker that is steps of the loop and never ticks: whoever is helped is helped by an event."""
    return make_pool(kind=SteppedPool, **options)


class Marks:
    """Makes marked buffers, and frees them at the end of its block; then nothing may be left on either side."""

    def __init__(self, pool: AsyncMemoryPool) -> None:
        self.pool = pool
        self.made: list[Spillable] = []

    def now(self, nbytes: int = HALF, **terms: object) -> Spillable:
        """Allocate and mark, on a thread."""
        return self.keep(self.pool.allocate(nbytes, **terms))  # type: ignore[arg-type]  # what tests pass

    async def __call__(self, nbytes: int = HALF, **terms: object) -> Spillable:
        """Allocate and mark, on a loop."""
        return self.keep(await self.pool.allocate_async(nbytes, **terms))  # type: ignore[arg-type]  # what tests pass

    def keep(self, buffer: Buffer) -> Spillable:
        """Mark what was allocated."""
        self.made.append(self.pool.spillable(buffer))
        return self.made[-1]

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        """Free all, and look whether anything is left."""
        for one in self.made:
            one.free()
        if error is None:
            whole(self.pool)
            whole(self.pool._host_pool("spilled"))

    async def __aenter__(self) -> Self:
        """Return itself."""
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        """Free all, and look."""
        self.__exit__(kind, error, trace)


def fill(buffer: Buffer, value: int) -> None:
    """Write a pattern by the host."""
    np.asarray(buffer)[:] = value


def holds(buffer: Buffer, value: int) -> bool:
    """Look whether the pattern is there."""
    return bool((np.asarray(buffer) == value).all())


def run(main: Callable[[], Awaitable[None]]) -> None:
    """Run on asyncio, but not for ever."""

    async def bounded() -> None:
        async with asyncio.timeout(LONG):
            await main()

    asyncio.run(bounded())


async def until(condition: Callable[[], bool]) -> None:
    """Wait for what another task or thread does."""
    while not condition():  # noqa: ASYNC110 -- what it waits for tells nobody
        await asyncio.sleep(0.001)


@asynccontextmanager
async def crowded_out() -> AsyncIterator[tuple[AsyncMemoryPool, Spillable, Buffer]]:
    """A marked buffer on the host, and another in its room: whoever uses the first waits until that is freed."""
    async with make_pool() as pool, Marks(pool) as marks:
        marked = await marks(LIMIT)
        held = await pool.allocate_async(LIMIT)
        yield pool, marked, held


async def use(marked: Spillable) -> None:
    """Use it as it is."""
    async with marked:
        pass


async def waiting_for(pool: AsyncMemoryPool, marked: Spillable) -> asyncio.Task[None]:
    """Have a task use it, and return once that waits for memory."""
    task = asyncio.create_task(use(marked))
    await until(lambda: pool.stats().waiting == 1)
    return task
