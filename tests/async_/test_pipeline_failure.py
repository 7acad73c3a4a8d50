"""Whatever goes wrong in a pipeline, its pool is empty and usable afterwards, and the error names stage and item."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from typing import cast

import anyio
import pytest

from asyncmem import AsyncMemoryPool, Buffer, DeadlockError, DeviceError
from asyncmem.devices.simulated.stream import SimulatedStream
from asyncmem.errors import StageError
from asyncmem.pipeline import Pipeline, StageShare, stage
from asyncmem.testing import run_steps
from tests.conservation import refillable, whole
from tests.sweeps import Kind, Scenario, Stage, sweep, sweep_on_trio

from .loops import Run
from .support import MIB, make_pool, quick_device, staged, stepped_pool, turns

Item = tuple[int, Buffer]
LIMIT = 6 * MIB


async def load(number: int, pool: StageShare) -> Item:
    buffer = await pool.allocate_async(MIB)
    await turns()
    return number, buffer


@stage(workers=2)
async def work(item: Item, pool: StageShare) -> Item:
    async with pool.allocate_async(MIB // 2):
        await turns()
    return item[0], await pool.allocate_async(MIB // 2)


async def finish(item: Item, _: StageShare) -> int:
    await turns()
    return item[0]


class Wrong(Exception):
    """What the tests' stages raise."""


async def fail_at_seven(item: Item, pool: StageShare) -> Item:
    kept = [item, await pool.allocate_async(MIB // 2)]
    if item[0] == 7:
        try:
            look_into(kept)
        except KeyError as inner:
            raise Wrong("it is a seven") from inner
    return item


def look_into(kept: list[object]) -> None:
    """Fail with memory in sight."""
    raise KeyError(len(kept))


async def first_failure(pool: AsyncMemoryPool, pipe: Pipeline[int, int]) -> StageError:
    """Map until the error comes, and see that it comes once, and over an empty pool, though it is still held."""
    results = pipe.map(range(100))
    expected = itertools.count()
    with pytest.raises(StageError) as caught:  # noqa: PT012 - which of them raises is not known
        while True:
            assert await anext(results) == next(expected)
    assert pool.stats().allocated_bytes == 0
    assert pool.stats().waiting == 0
    assert [one async for one in results] == []
    return caught.value


def test_a_stage_that_raises_ends_the_run_and_is_named(everywhere: Run) -> None:
    """The first error comes once, with what the stage raised as its cause; the pipeline can be used again."""

    async def main() -> None:
        async with make_pool(LIMIT) as pool:
            async with Pipeline(load, fail_at_seven, finish, pool=pool) as pipe:
                for _ in range(2):
                    error = await first_failure(pool, pipe)
                    assert (error.stage, error.item) == ("fail_at_seven", 7)
                    assert str(error) == "stage 'fail_at_seven' failed at item 7: Wrong: it is a seven"
                    assert isinstance(error.__cause__, Wrong)
                    await refillable(pool, LIMIT)
                assert [one async for one in pipe.map(range(7))] == list(range(7))
            whole(pool)

    everywhere(main)


def test_when_all_workers_raise_at_once_the_first_is_told() -> None:
    """Several failures before any of them has cancelled the others are one error: that of whoever failed first."""
    failed: list[int] = []

    @stage(workers=3)
    async def together(number: int, pool: StageShare) -> Buffer:
        buffer = await pool.allocate_async(MIB)
        await anyio.sleep(1)
        failed.append(number)
        raise Wrong(buffer.nbytes)

    async def main() -> None:
        async with stepped_pool(LIMIT) as pool, Pipeline(together, pool=pool) as pipe:
            with pytest.raises(StageError) as told:
                await anext(pipe.map(range(3)))
            assert told.value.item == failed[0]
            assert pool.stats().allocated_bytes == 0

    run_steps(main())
    assert len(failed) > 1


def test_what_was_finished_before_its_turn_is_let_go_too(virtually: Run) -> None:
    """Items that wait for an earlier one, which another worker has and fails, hold nothing afterwards."""

    @stage(workers=3)
    async def fail_at_the_first(number: int, pool: StageShare) -> Buffer:
        buffer = await pool.allocate_async(MIB)
        if number == 0:
            await anyio.sleep(1)
            raise Wrong
        return buffer

    async def main() -> None:
        async with stepped_pool(LIMIT) as pool, Pipeline(fail_at_the_first, pool=pool) as pipe:
            results = pipe.map(range(9))
            with pytest.raises(StageError):
                await anext(results)
            assert pool.stats().allocated_bytes == 0

    virtually(main)


def test_a_stage_that_hangs_is_cancelled_at_its_time_limit(virtually: Run) -> None:
    """The error is of a `TimeoutError` that says how long; what the stage held is free."""

    @stage(timeout="2 s")
    async def hang(item: Item, pool: StageShare) -> Item:
        async with pool.allocate_async(MIB):
            await anyio.sleep(1.5 if item[0] < 3 else 1000)
        return item

    async def main() -> None:
        async with stepped_pool(LIMIT) as pool, Pipeline(load, hang, finish, pool=pool) as pipe:
            error = await first_failure(pool, pipe)
            assert (error.stage, error.item) == ("hang", 3)
            assert isinstance(error.__cause__, TimeoutError)
            assert "longer than 2 s" in str(error)

    virtually(main)


def sources() -> dict[str, Callable[[], Iterator[int] | AsyncIterator[int]]]:
    def plain() -> Iterator[int]:
        yield from range(4)
        raise Wrong("no more")

    async def awaited() -> AsyncIterator[int]:
        for number in range(4):
            await turns()
            yield number
        raise Wrong("no more")

    return {"plain": plain, "awaited": awaited}


@pytest.mark.parametrize("source", sources())
def test_a_source_that_raises_ends_the_run(virtually: Run, source: str) -> None:
    """The source counts as a stage of that name, and the item is the one that did not come."""

    async def main() -> None:
        async with stepped_pool(LIMIT) as pool, Pipeline(load, finish, pool=pool) as pipe:
            with pytest.raises(StageError) as told:
                async for _ in pipe.map(sources()[source]()):
                    pass
            assert (told.value.stage, told.value.item) == ("source", 4)
            assert isinstance(told.value.__cause__, Wrong)
            assert pool.stats().allocated_bytes == 0

    virtually(main)


@pytest.mark.parametrize(("call", "beginning"), [("allocate_segment", 0), ("record", 5)])
def test_a_device_that_fails_ends_the_run(virtually: Run, call: str, beginning: int) -> None:
    """The stage that meets an outage of the driver is named, and once that is over, all memory is there again."""
    device = quick_device()

    @stage(stream="compute")
    async def compute(item: Item, pool: StageShare) -> Item:
        if item[0] == beginning:
            device.fail(call, times=20)
        return item[0], await pool.allocate_async(2 * MIB)

    async def main() -> None:
        async with stepped_pool(LIMIT, device=device, segment_size=MIB) as pool:
            async with Pipeline(load, compute, finish, pool=pool) as pipe:
                error = await first_failure(pool, pipe)
                assert error.stage in ("load", "compute")
                assert isinstance(error.__cause__, DeviceError)
            while device.log._faults:
                with suppress(DeviceError):
                    device.log.enter(call)
            whole(pool)
            await refillable(pool, LIMIT)

    virtually(main)


async def take_in_pieces(number: int, pool: StageShare) -> Item:
    """Hold a part while waiting for the rest, which is more than there will ever be."""
    first = await pool.allocate_async(2 * MIB)
    second = await pool.allocate_async(2 * MIB)
    del first
    return number, second


def test_a_stage_that_waits_for_what_never_comes_is_told(virtually: Run) -> None:
    """Where everybody under way waits for memory and nobody else has any, the last who waits gets `DeadlockError`."""

    async def main() -> None:
        async with stepped_pool(LIMIT, stall_after=10.0) as pool:
            async with Pipeline(take_in_pieces, work, pool=pool) as pipe:
                with pytest.raises(StageError, match="stage 'take_in_pieces' failed at item 0: Deadlock") as told:
                    await anext(pipe.map(range(3)))
            assert isinstance(told.value.__cause__, DeadlockError)
            (owner,) = told.value.__cause__.owners
            assert (owner.owner, owner.held, owner.waiting) == ("stage take_in_pieces", 2 * MIB, 2 * MIB)
            assert "in one piece" in str(told.value.__cause__)
            whole(pool)

    virtually(main)


async def rest(item: Item, pool: StageShare) -> Item:
    """Take memory, and take time that no request explains."""
    async with pool.allocate_async(MIB):
        await anyio.sleep(100)
    return item


def test_a_stage_that_is_slow_is_waited_for(virtually: Run) -> None:
    """While any worker is busy with something else than waiting for memory, that may end well."""

    async def main() -> None:
        async with stepped_pool(4 * MIB, stall_after=10.0) as pool, Pipeline(load, rest, finish, pool=pool) as pipe:
            assert [one async for one in pipe.map(range(4))] == list(range(4))

    virtually(main)


@stage(stream="work")
async def leave_to_the_device(number: int, pool: StageShare) -> int:
    """Have the device free the memory, once it is done with it."""
    buffer = await pool.allocate_async(4 * MIB)
    stream = cast("SimulatedStream", pool.stream)
    stream.launch(100.0, writes=[buffer])
    stream.record().notify(buffer.free)
    return number


def test_a_device_that_still_works_is_waited_for(virtually: Run) -> None:
    """What it calls when it is done may free memory, so nobody is stuck before it is idle."""

    async def main() -> None:
        async with stepped_pool(LIMIT, stall_after=10.0) as pool:
            async with Pipeline(leave_to_the_device, pool=pool) as pipe:
                assert [one async for one in pipe.map(range(4))] == list(range(4))
            assert pool.device.now >= 300
            await pool.device.record_all()

    virtually(main)


@pytest.mark.parametrize("holder", ["consumer", "other"])
def test_a_stage_that_waits_for_somebody_who_holds_memory_waits_on(virtually: Run, holder: str) -> None:
    """As long as a result is held, or others have memory of the pool, that may be freed yet: it is no deadlock."""

    async def main() -> None:
        async with stepped_pool(4 * MIB, stall_after=10.0) as pool:
            other = await pool.allocate_async(7 * MIB // 2) if holder == "other" else None
            async with Pipeline(load, pool=pool) as pipe, anyio.create_task_group() as tasks:
                results = pipe.map(range(8), in_flight=6)
                held: list[Item] = []

                async def let_go() -> None:
                    await anyio.sleep(100)
                    held.clear()
                    if other is not None:
                        other.free()

                tasks.start_soon(let_go)
                async for item in results:
                    if holder == "consumer":
                        held.append(item)
                    del item
                assert len(held) == (4 if holder == "consumer" else 0)
                held.clear()

    virtually(main)


async def complain(pool: AsyncMemoryPool) -> None:
    """Map, and raise in the midst of it."""
    async with Pipeline(load, work, finish, pool=pool) as pipe:
        async for result in pipe.map(range(100)):
            if result == 3:
                raise Wrong("mine")


def test_an_error_in_the_block_is_raised_as_it_is(virtually: Run) -> None:
    """What the consumer raises ends the pipeline, and is not wrapped in a group; the pool is empty behind it."""

    async def main() -> None:
        async with stepped_pool(LIMIT) as pool:
            with pytest.raises(Wrong, match="mine"):
                await complain(pool)
            whole(pool)
            await refillable(pool, LIMIT)

    virtually(main)


async def mapping(stage: Stage) -> None:
    """One who maps, and one who uses the same pool; whoever is struck leaves the pool as it was."""
    async with staged(stage, LIMIT) as pool:

        async def consume() -> None:
            async with Pipeline(load, work, finish, pool=pool) as pipe:
                got = [result async for result in pipe.map(range(3))]
                assert got == list(range(3))

        async def compete() -> None:
            async with stage.watch(pool.allocate_async(2 * MIB)):
                await turns(5)

        stage.actor("consumer", consume)
        stage.actor("competitor", compete)
        await stage.finish()
        assert not pool._opened.budgets


async def leaving_early(stage: Stage) -> None:
    """A consumer that leaves its loop, and then maps again."""
    async with staged(stage, LIMIT) as pool:

        async def consume() -> None:
            async with Pipeline(load, finish, pool=pool) as pipe:
                async for result in pipe.map(range(9), in_flight=3):
                    assert result == 0
                    break
                async with pipe.map(range(2)) as results:
                    assert await anext(results) == 0

        stage.actor("consumer", consume)
        await stage.finish()
        assert not pool._opened.budgets


async def failing(stage: Stage) -> None:
    """A stage that raises, in the midst of others; also while somebody is struck."""
    async with staged(stage, LIMIT) as pool:

        async def consume() -> None:
            async with Pipeline(load, fail_at_seven, finish, pool=pool) as pipe:
                with pytest.raises(StageError, match="item 1: Wrong"):
                    async for _ in pipe.map([6, 7, 8], in_flight=2):
                        pass

        stage.actor("consumer", consume)
        await stage.finish()
        assert not pool._opened.budgets


SCENARIOS: dict[str, Scenario] = {one.__name__: one for one in (mapping, leaving_early, failing)}
KINDS = [kind for kind in Kind if kind is not Kind.REQUEST]


@pytest.mark.parametrize("name", SCENARIOS)
def test_cancelling_at_any_step_leaves_the_pool_empty(name: str) -> None:
    """Each kind of cancellation strikes each actor, at every other of its steps."""
    assert sweep(SCENARIOS[name], kinds=KINDS, stride=2).strikes > 20


@pytest.mark.parametrize("name", SCENARIOS)
def test_trio_leaves_the_pool_empty_too(name: str) -> None:
    """The same on trio, by a scope and by a deadline."""
    assert sweep_on_trio(SCENARIOS[name], kinds=[Kind.SCOPE, Kind.TIMEOUT], stride=2).strikes > 10
