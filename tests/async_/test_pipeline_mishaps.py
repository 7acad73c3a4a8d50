"""What stages and sources raise that is no plain error: cancellations of others, groups, and errors of cleanup."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import anyio
import pytest

from asyncmem import StageError, StepError
from asyncmem.pipeline import Pipeline, stage
from asyncmem.pipeline.share import StageShare
from asyncmem.testing import run_steps
from asyncmem.testing.conservation import whole

from .loops import Run
from .models import layers, parallel
from .support import MIB, stepped_pool

LIMIT = 8 * MIB


async def cancelled_elsewhere() -> None:
    """Await something that has been cancelled, while nobody has cancelled this task."""
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    future.cancel()
    await future


async def wait_for_others(item: int, pool: StageShare) -> int:
    """A stage that fails so at one item, holding memory."""
    async with pool.allocate_async(MIB):
        if item == 3:
            await cancelled_elsewhere()
    return item


async def same(item: int, pool: StageShare) -> int:  # noqa: ARG001 - it needs no memory
    """A stage that does nothing."""
    return item


def plain() -> Iterator[int]:
    yield from range(3)
    raise asyncio.CancelledError


async def awaited() -> AsyncIterator[int]:
    for number in range(3):
        yield number
    await cancelled_elsewhere()


@pytest.mark.parametrize(
    ("function", "source", "name"),
    [(wait_for_others, lambda: range(6), "wait_for_others"), (same, plain, "source"), (same, awaited, "source")],
    ids=["stage", "source", "awaited source"],
)
def test_a_cancellation_of_somebody_else_is_an_error_and_not_the_end(
    function: Callable[..., Any], source: Callable[[], Any], name: str
) -> None:
    """Else the results would end in silence, with items missing."""

    async def main() -> None:
        async with stepped_pool(LIMIT) as pool:
            async with Pipeline(function, pool=pool) as pipe:
                with pytest.raises(StageError) as told:
                    async for _ in pipe.map(source()):
                        pass
                assert str(told.value).endswith("item 3: CancelledError")
                assert (told.value.stage, told.value.item) == (name, 3)
                assert [one async for one in pipe.map(range(2))] == [0, 1]
            whole(pool)

    run_steps(main())


def test_so_it_is_in_a_step_of_pipeline_parallelism() -> None:
    """Else the other stages would wait for ever."""

    async def hook(context: Any) -> None:
        if (context.stage, context.micro_batch) == ("stage 1", 2):
            await cancelled_elsewhere()

    async def main() -> None:
        async with parallel(layers(3, hook)) as (model, _):
            with pytest.raises(StepError, match=r"forward of micro-batch 2: CancelledError$") as told:
                await model.run(range(4))
            assert told.value.stage == "stage 1"

    run_steps(main())


def test_a_cancelled_pipeline_is_no_failure(virtually: Run) -> None:
    """Whoever cancels gets no error of a stage, however the stage ends."""

    async def slow(item: int, pool: StageShare) -> int:
        async with pool.allocate_async(MIB):
            await anyio.sleep(100)
        return item

    async def main() -> None:
        async with stepped_pool(LIMIT) as pool:
            with anyio.move_on_after(1) as scope:
                async with Pipeline(slow, pool=pool) as pipe:
                    async for _ in pipe.map(range(6)):
                        pass
            assert scope.cancelled_caught
            whole(pool)

    virtually(main)


def test_a_group_of_errors_is_told_by_its_errors(virtually: Run) -> None:
    """What a stage's own tasks have raised is said, and not how many; the group is the cause."""

    async def work(item: int, pool: StageShare) -> int:
        async def fail(error: Exception) -> None:
            buffer = await pool.allocate_async(MIB)
            assert buffer.alive
            raise error

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(fail, ValueError("a bad part"))
        return item

    async def main() -> None:
        async with stepped_pool(LIMIT) as pool, Pipeline(work, pool=pool) as pipe:
            with pytest.raises(StageError, match=r"failed at item 0: ValueError: a bad part$") as told:
                await anext(pipe.map(range(3)))
            assert isinstance(told.value.__cause__, ExceptionGroup)
            assert pool.stats().allocated_bytes == 0

    virtually(main)


def test_an_error_of_cleanup_does_not_hide_the_first(virtually: Run) -> None:
    """A worker that is cancelled because of it may raise something else."""

    @stage(workers=2)
    async def work(item: int, pool: StageShare) -> int:  # noqa: ARG001 - it needs no memory
        if item == 1:
            await anyio.sleep(1)
            raise ValueError
        try:
            await anyio.sleep(100)
        finally:
            raise KeyError("of the cleanup")

    async def main() -> None:
        async with stepped_pool(LIMIT) as pool, Pipeline(work, pool=pool) as pipe:
            with pytest.raises(StageError, match=r"failed at item 1: ValueError$"):
                await anext(pipe.map(range(3)))

    virtually(main)
