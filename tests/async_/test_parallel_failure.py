"""Whatever goes wrong in pipeline parallelism, the pools are empty and usable, and the error names the step."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import anyio
import pytest

from asyncmem import AsyncMemoryPool, DeviceError
from asyncmem.devices.simulated.timeline import VirtualClock
from asyncmem.errors import StepError
from asyncmem.pipeline.parallel import PipelineParallel, StepContext
from tests.conservation import refillable, whole
from tests.sweeps import Kind, Scenario, Stage, sweep, sweep_on_trio

from .loops import Run
from .models import Hook, layers, machine, parallel, stages, stream_of
from .support import MIB, staged, turns

COUNT = 5
LIMIT = 128 * MIB


class Wrong(Exception):
    """What the tests' steps raise."""


def raising(stage: str, micro_batch: int, *, forward: bool) -> Hook:
    async def hook(context: StepContext) -> None:
        await turns()
        if (context.stage, context.micro_batch, context.step.forward) == (stage, micro_batch, forward):
            kept = await context.allocate(0)
            raise Wrong(kept.nbytes)

    return hook


async def usable(pools: list[AsyncMemoryPool]) -> None:
    """See that nothing is missing."""
    for pool in pools:
        await refillable(pool, LIMIT)
        whole(pool)
        assert not pool._opened.budgets
        await refillable(pool, LIMIT)


@pytest.mark.parametrize("forward", [True, False])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_step_that_raises_ends_the_run_and_is_named(virtually: Run, stage: int, forward: bool) -> None:
    """The error says stage, micro-batch and direction; what was raised is its cause; and all can be used again."""

    async def main() -> None:
        hook = raising(f"stage {stage}", 3, forward=forward)
        async with parallel(layers(3, hook)) as (model, pools):
            for _ in range(2):
                with pytest.raises(StepError) as told:
                    await model.run(range(COUNT))
                error = told.value
                assert (error.stage, error.micro_batch, error.forward) == (f"stage {stage}", 3, forward)
                way = "forward" if forward else "backward"
                assert str(error) == f"stage 'stage {stage}' failed in the {way} of micro-batch 3: Wrong: 0"
                assert isinstance(error.__cause__, Wrong)
                await usable(pools)
            assert await model.run(range(3)) == [0, 10, 20]

    virtually(main)


def test_it_is_so_with_the_pools_own_thread(everywhere: Run) -> None:
    """On asyncio, uvloop and trio."""

    async def main() -> None:
        hook = raising("stage 1", 2, forward=False)
        async with parallel(layers(2, hook), kind=AsyncMemoryPool) as (model, pools):
            with pytest.raises(StepError, match="stage 'stage 1' failed in the backward of micro-batch 2: Wrong"):
                await model.run(range(COUNT))
            assert [pool.stats().allocated_bytes for pool in pools] == [0, 0]
            await usable(pools)

    everywhere(main)


def test_a_step_that_hangs_is_cancelled_at_its_time_limit(virtually: Run) -> None:
    """The error is of a `TimeoutError` that says how long."""

    async def hang(context: StepContext) -> None:
        if context.micro_batch == 1 and context.stage == "stage 1":
            await anyio.sleep(1000)

    async def main() -> None:
        async with parallel(layers(2, hang), timeout="5 s") as (model, pools):
            with pytest.raises(StepError, match=r"forward of micro-batch 1: .* longer than 5 s") as told:
                await model.run(range(COUNT))
            assert isinstance(told.value.__cause__, TimeoutError)
            await usable(pools)

    virtually(main)


def test_work_that_the_device_does_not_finish_is_told_at_the_time_limit(virtually: Run) -> None:
    """The step has been queued, and its stream does not come to its end: it is named, and not those behind it."""

    async def main() -> None:
        devices = machine(2)

        async def hang(context: StepContext) -> None:
            if context.micro_batch == 1 and context.stage == "stage 0" and context.step.forward:
                stream_of(context).launch(100)

        clock = devices[0].clock
        assert isinstance(clock, VirtualClock)
        clock.autojump = False
        async with parallel(layers(2, hang), devices=devices, timeout="5 s") as (model, pools):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(later, 1, devices[0].advance, 10)
                with pytest.raises(StepError, match="'stage 0' failed in the forward of micro-batch 1: TimeoutError"):
                    await model.run(range(COUNT))
            devices[0].run_until_idle()
            await usable(pools)

    virtually(main)


async def later(seconds: float, call: Callable[[float], None], value: float) -> None:
    await anyio.sleep(seconds)
    call(value)


@pytest.mark.parametrize("call", ["record", "wait", "peer_copy"])
@pytest.mark.parametrize("at", [0, 1])
def test_a_device_that_fails_ends_the_run(virtually: Run, call: str, at: int) -> None:
    """The step that meets the outage is named, and once it is over, all memory is there again."""

    async def main() -> None:
        devices = machine(2)

        async def fail(context: StepContext) -> None:
            if context.micro_batch == 2 and context.stage == f"stage {at}":
                devices[at].fail(call, times=12)

        async with parallel(layers(2, fail), devices=devices) as (model, pools):
            with pytest.raises(StepError) as told:
                await model.run(range(COUNT))
            assert isinstance(told.value.__cause__, DeviceError)
            while devices[at].log._faults:
                with suppress(DeviceError):
                    devices[at].log.enter(call)
            for device in devices:
                device.run_until_idle()  # a copy may have begun that nobody could be ordered behind
            await usable(pools)

    virtually(main)


async def running(stage: Stage) -> None:
    """One who runs a model of three stages, and one who uses the same pool; whoever is struck leaves it whole."""
    async with staged(stage, LIMIT) as pool:

        async def run() -> None:
            model = PipelineParallel(stages(layers(3, pausing)), pool)
            assert await model.run(range(3)) == [0, 10, 20]

        async def compete() -> None:
            async with stage.watch(pool.allocate_async(90 * MIB)):
                await turns(5)

        stage.actor("runner", run)
        stage.actor("competitor", compete)
        await stage.finish()
        assert not pool._opened.budgets


async def failing(stage: Stage) -> None:
    """A step that raises, in the midst of others; also while somebody is struck."""
    async with staged(stage, LIMIT) as pool:

        async def run() -> None:
            model = PipelineParallel(stages(layers(2, raising("stage 1", 1, forward=True))), pool)
            with pytest.raises(StepError, match="forward of micro-batch 1: Wrong"):
                await model.run(range(3))

        stage.actor("runner", run)
        await stage.finish()
        assert not pool._opened.budgets


async def pausing(context: StepContext) -> None:
    """Hold memory over a turn of the loop."""
    async with await context.allocate(0):
        await turns()


SCENARIOS: dict[str, Scenario] = {one.__name__: one for one in (running, failing)}
KINDS = [kind for kind in Kind if kind is not Kind.REQUEST]


@pytest.mark.parametrize("name", SCENARIOS)
def test_cancelling_at_any_step_leaves_the_pool_empty(name: str) -> None:
    """Each kind of cancellation strikes each actor, at every third of its steps."""
    assert sweep(SCENARIOS[name], kinds=KINDS, stride=3).strikes > 20


@pytest.mark.parametrize("name", SCENARIOS)
def test_trio_leaves_the_pool_empty_too(name: str) -> None:
    """The same on trio, by a scope and by a deadline."""
    assert sweep_on_trio(SCENARIOS[name], kinds=[Kind.SCOPE, Kind.TIMEOUT], stride=3).strikes > 10
