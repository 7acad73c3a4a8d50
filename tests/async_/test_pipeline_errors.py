"""What stages and sources raise that is no plain error: cancellations of others, groups, and errors of cleanup."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import anyio
import pytest

from asyncmem.errors import StageError, StepError
from asyncmem.pipeline import Pipeline, StageShare, stage
from asyncmem.testing import run_steps
from tests.conservation import whole

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


def test_whoever_passed_an_error_on_goes_on() -> None:
    """An error may have come from a task that is still at work: a service that answers many, and has caught it."""
    answered: list[int] = []

    async def serve(requests: asyncio.Queue[tuple[int, asyncio.Future[int]]]) -> None:
        while True:
            number, answer = await requests.get()
            try:
                answer.set_result([0, 1, 3, 4, 5, 6].index(number))
            except ValueError as error:
                answer.set_exception(error)
            answered.append(number)

    async def main() -> None:
        requests: asyncio.Queue[tuple[int, asyncio.Future[int]]] = asyncio.Queue()

        async def ask(item: int, pool: StageShare) -> int:  # noqa: ARG001 - it needs no memory
            answer: asyncio.Future[int] = asyncio.get_running_loop().create_future()
            requests.put_nowait((item, answer))
            return await answer

        service = asyncio.create_task(serve(requests))
        async with stepped_pool(LIMIT) as pool, Pipeline(ask, pool=pool) as pipe:
            with pytest.raises(StageError, match="not in list"):
                async for _ in pipe.map(range(4)):
                    pass
            assert [one async for one in pipe.map([5, 6])] == [4, 5]
        assert answered[-2:] == [5, 6]
        service.cancel()

    run_steps(main())


def test_whoever_leaves_by_an_error_goes_on_after_the_block(virtually: Run) -> None:
    """What ends the workers has that error behind it, and behind that the block that waits for their end."""

    @stage(workers=3)
    async def slow(item: int, pool: StageShare) -> int:
        async with pool.allocate_async(MIB):
            await anyio.sleep(1 if item == 0 else 100)
        return item

    async def main() -> None:
        ends: list[str] = []
        async with stepped_pool(LIMIT) as pool:
            try:
                async with Pipeline(slow, pool=pool) as pipe:
                    async for item in pipe.map(range(6)):
                        ends[item + 1]
            except IndexError:
                ends.append("left")
            await anyio.sleep(1)
            whole(pool)
        assert ends == ["left"]

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


INTERRUPTED = """
import os, signal, sys, threading, time
import anyio
from asyncmem import AsyncMemoryPool
from asyncmem.pipeline import Pipeline, stage

def interrupt():
    time.sleep(0.2)  # until nothing runs, most likely, so that the loop's own task is interrupted
    os.kill(os.getpid(), signal.SIGINT)

@stage(workers=2)
async def hang(item, pool):
    async with pool.allocate_async(1000):
        if item == 1:
            threading.Thread(target=interrupt).start()
        await anyio.sleep(1000)

async def main():
    async with AsyncMemoryPool("host", limit="1 MiB") as pool:
        try:
            async with Pipeline(hang, pool=pool) as pipe:
                async for _ in pipe.map(range(9)):
                    pass
        finally:
            print(pool.stats().allocated_bytes, "bytes left")

try:
    anyio.run(main, backend=sys.argv[1])
except* KeyboardInterrupt:  # trio may raise it in any task, and so in a group
    print("interrupted")
"""


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_control_c_ends_it(backend: str) -> None:
    """With the interrupt itself, and nothing held: the loop's own frames are behind what ends the workers."""
    program = [sys.executable, "-c", INTERRUPTED, backend]
    done = subprocess.run(program, capture_output=True, text=True, timeout=100, check=False)
    assert (done.stdout, done.stderr) == ("0 bytes left\ninterrupted\n", "")
