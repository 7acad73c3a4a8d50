"""What this package makes streams for gives them back: a program may do so at each of its rounds."""

from __future__ import annotations

import gc
import threading
from collections.abc import Awaitable, Callable

import anyio
import anyio.to_thread
import numpy as np
import pytest

from asyncmem import AsyncMemoryPool, Buffer
from asyncmem.pipeline import DoubleBuffer, Pipeline, Prefetcher, StageShare, stage
from asyncmem.pipeline.parallel import ParallelStage, PipelineParallel, StepContext

from .feeds import LIMIT, TimedDevice

DATA = np.zeros((4, 3), np.float32)


async def pipeline(pool: AsyncMemoryPool) -> None:
    @stage(stream="work")
    async def work(item: int, pool: StageShare) -> Buffer:
        return await pool.allocate_async(item)

    async with Pipeline(work, pool=pool) as pipe:
        assert [buffer.nbytes async for buffer in pipe.map([1, 2])] == [1, 2]


async def prefetcher(pool: AsyncMemoryPool) -> None:
    assert len([None async for _ in Prefetcher(pool).wrap([DATA] * 5)]) == 5


async def double_buffer(pool: AsyncMemoryPool) -> None:
    async with DoubleBuffer(pool, DATA.shape) as feed:
        feed.prefetch_next(DATA)
        await feed.swap_async()


async def parallel(pool: AsyncMemoryPool) -> None:
    async def forward(item: int, context: StepContext) -> int:  # noqa: ARG001 - it needs nothing
        return item

    async def backward(gradient: object, saved: tuple[object, ...], context: StepContext) -> None:  # noqa: ARG001
        return None

    model = PipelineParallel([ParallelStage(forward, backward, saved=0, output=0)], pool)
    assert await model.run([5, 6]) == [5, 6]


async def dropped() -> None:
    """Return once nobody has the streams any more: the threads that read ahead keep them until they end."""
    for thread in threading.enumerate():
        if thread.name.startswith("asyncmem prefetch"):
            await anyio.to_thread.run_sync(thread.join, 10)
    gc.collect()


@pytest.mark.parametrize("make", [pipeline, prefetcher, double_buffer, parallel])
def test_rounds_do_not_leave_streams_behind(make: Callable[[AsyncMemoryPool], Awaitable[None]]) -> None:
    """The pool knows as many after the tenth as after the first, and on the host each has a thread."""

    async def main() -> None:
        async with AsyncMemoryPool(TimedDevice(), limit=LIMIT) as pool:
            known = pool._opened.core.stream_objects
            await make(pool)
            await dropped()
            first = len(known)
            assert first > 1
            for _ in range(9):
                await make(pool)
                await dropped()
            assert len(known) == first

    anyio.run(main)


def test_two_at_a_time_have_streams_of_their_own() -> None:
    """What one of them gave back, one that comes later has; under one name there are others."""
    with AsyncMemoryPool(TimedDevice(), limit=LIMIT) as pool:
        with DoubleBuffer(pool, 4), DoubleBuffer(pool, 4):
            assert len(pool._opened.core.stream_objects) == 1 + 4
        with DoubleBuffer(pool, 4, buffers=3):
            assert len(pool._opened.core.stream_objects) == 1 + 4


def test_two_pipelines_that_name_the_same_stream_have_their_own() -> None:
    """For as long as both are open; the next one has one of theirs."""
    seen: list[object] = []

    @stage(stream="work")
    async def note(item: int, pool: StageShare) -> int:
        seen.append(pool.stream)
        return item

    async def main() -> None:
        async with AsyncMemoryPool(TimedDevice(), limit=LIMIT) as pool:
            async with Pipeline(note, pool=pool) as first, Pipeline(note, pool=pool) as second:
                assert [one async for one in first.map([1])] == [one async for one in second.map([1])]
            async with Pipeline(note, pool=pool) as third:
                assert [one async for one in third.map([1])] == [1]

    anyio.run(main)
    assert seen[0] is not seen[1]
    assert seen[2] in seen[:2]
