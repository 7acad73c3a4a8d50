"""Pipeline parallelism takes the time and the memory of its schedule, on every loop, and gives what the model gives."""

from __future__ import annotations

import cProfile
import math
import re
from collections.abc import Callable
from functools import partial
from random import Random
from typing import Any, Literal, cast

import anyio
import numpy as np
import pytest

from asyncmem import Array, AsyncMemoryPool, Buffer, InvalidRequest
from asyncmem.devices import Host, HostStream
from asyncmem.devices.simulated.timeline import VirtualClock
from asyncmem.errors import StepError
from asyncmem.pipeline.parallel import ParallelStage, PipelineParallel, StepContext, Use
from asyncmem.pipeline.parallel.schedule import SCHEDULES
from asyncmem.testing import StepLoop, SteppedPool, run_steps
from tests.conservation import refillable

from .loops import Run
from .models import BACKWARD, FORWARD, OUTPUT, SAVED, Layer, layers, machine, parallel, stages, stream_of
from .support import MIB, stepped_pool

Kind = Literal["1f1b", "eager", "gpipe"]
Floats = np.ndarray[Any, np.dtype[np.float64]]
KINDS: list[Kind] = ["1f1b", "eager", "gpipe"]
COUNT = 8

each_schedule = pytest.mark.parametrize("schedule", KINDS)
two_and_four = pytest.mark.parametrize("count", [2, 4])


async def timed(schedule: Kind, count: int, kind: type[AsyncMemoryPool], ahead: int | None = 4) -> None:
    """Run equal stages, and hold them to the schedule's own bubble."""
    async with parallel(layers(count), kind=kind, schedule=schedule, ahead=ahead) as (model, _):
        assert await model.run(range(COUNT)) == [number * 10 for number in range(COUNT)]
        report = model.report()
    least = (count - 1) / (COUNT + count - 1)
    assert math.isclose(report.least_bubble, least, rel_tol=1e-6)
    assert report.bubble <= 1.05 * least
    assert math.isclose(report.seconds, (COUNT + count - 1) * (FORWARD + BACKWARD), rel_tol=0.01)
    for stage in report.stages:
        assert math.isclose(stage.forward_s, FORWARD, rel_tol=0.01)
        assert math.isclose(stage.backward_s, BACKWARD, rel_tol=0.01)
        assert math.isclose(stage.busy, 1 - least, rel_tol=0.05)


@each_schedule
@two_and_four
def test_equal_stages_are_idle_no_longer_than_their_schedule_says(virtually: Run, schedule: Kind, count: int) -> None:
    """The bubble is the formula's, and what the report says of the steps is what they took."""
    virtually(lambda: timed(schedule, count, SteppedPool))


@each_schedule
@two_and_four
def test_it_is_so_on_every_loop(everywhere: Run, schedule: Kind, count: int) -> None:
    """With a pool's own thread, on asyncio, uvloop and trio."""
    everywhere(lambda: timed(schedule, count, AsyncMemoryPool))


@each_schedule
def test_all_of_it_may_be_queued_at_once(virtually: Run, schedule: Kind) -> None:
    """No step is waited for by the host because of another: streams alone keep the order, and lose no time."""
    virtually(lambda: timed(schedule, 4, SteppedPool, ahead=None))


@pytest.mark.parametrize("limits", [None, [44 * MIB, 44 * MIB]], ids=["ample", "tight"])
def test_copies_run_beside_the_work(virtually: Run, limits: list[int] | None) -> None:
    """Only the first micro-batch waits for its copies, forward and backward; all others come beside work."""

    async def main() -> None:
        copy = 0.5
        devices = machine(2, peer_rate=int(OUTPUT / copy))
        async with parallel(layers(2), devices=devices, limits=limits, schedule="gpipe") as (model, _):
            await model.run(range(COUNT))
            report = model.report()
        assert math.isclose(report.seconds, (COUNT + 1) * (FORWARD + BACKWARD) + 2 * copy, rel_tol=0.01)
        assert math.isclose(report.transfer_s, 2 * COUNT * copy, rel_tol=0.01)
        assert math.isclose(report.overlap, 1 - 1 / COUNT, rel_tol=0.01)

    virtually(main)


def test_what_is_on_its_way_costs_no_time_where_stages_are_eager(virtually: Run) -> None:
    """By 1F1B two stages wait for copies at each micro-batch; with a forward more, at the first and the last."""

    async def main() -> None:
        copy, seconds = 0.5, {}
        for schedule in KINDS:
            devices = machine(2, peer_rate=int(OUTPUT / copy))
            async with parallel(layers(2), devices=devices, schedule=schedule) as (model, _):
                await model.run(range(COUNT))
                seconds[schedule] = model.report().seconds
        least = (COUNT + 1) * (FORWARD + BACKWARD) + 2 * copy
        assert math.isclose(seconds["eager"], least, rel_tol=0.01)
        assert math.isclose(seconds["1f1b"], least + (COUNT - 2) * copy, rel_tol=0.01)

    virtually(main)


@each_schedule
def test_a_stage_keeps_what_its_schedule_lets_it_and_holds_no_more_than_its_bound(
    virtually: Run, schedule: Kind
) -> None:
    """The bound is that of the schedule, times what a micro-batch is stated to take; the budgets hold it."""

    async def main() -> None:
        model = layers(4)
        async with parallel(model, schedule=schedule) as (runner, pools):
            needs = runner.needs(COUNT)
            await runner.run(range(COUNT))
            plan = SCHEDULES[schedule](4, COUNT)
            for at, stage in enumerate(runner.report().stages):
                live = plan.live(at)
                assert model[at].most_live == stage.live == live
                inputs = plan.live(at - 1) * OUTPUT if at else 0
                gradients = min(2, live) * OUTPUT if at < 3 else 0
                assert stage.bound_bytes == needs[at] == live * SAVED + 2 * OUTPUT + inputs + gradients
                assert live * SAVED <= stage.peak_bytes <= stage.bound_bytes
                assert pools[at].stats().peak_allocated == stage.bound_bytes
                assert pools[at].stats().allocated_bytes == 0
                assert not pools[at]._opened.budgets
                pools[at].check()

    virtually(main)


def test_a_pool_that_is_too_small_is_refused_with_the_sum() -> None:
    """Nothing has begun then."""

    async def main() -> None:
        async with stepped_pool(16 * MIB) as pool:
            with pytest.raises(InvalidRequest) as refused:
                await PipelineParallel(stages(layers(2)), pool).run(range(3))
            assert str(refused.value) == (
                "limit: expected at least 20 MiB: "
                "stage 0: 2 x 4 MiB saved + 2 x 1 MiB outputs + 2 x 1 MiB gradients = 12 MiB; "
                "stage 1: 1 x 4 MiB saved + 2 x 1 MiB outputs + 2 x 1 MiB inputs = 8 MiB, got 16 MiB"
            )

    run_steps(main())


class Square:
    """A stage of real numbers on the host: the square of its input, or its sum at the last stage."""

    def __init__(self, *, last: bool) -> None:
        self.last = last

    async def forward(self, item: Any, context: StepContext) -> Any:
        if isinstance(item, int):
            numbers = await context.empty(4, "float64", use="saved")
            context.run(fill, np.asarray(numbers), item)
        else:
            numbers = item["numbers"]
        context.save(numbers)
        if self.last:
            return await cast(HostStream, context.stream).run(total, np.asarray(numbers))
        answer = await context.empty(4, "float64", use="output")
        context.run(np.square, np.asarray(numbers), np.asarray(answer))
        return {"numbers": answer, "plain": context.micro_batch}

    async def backward(self, gradient: Any, saved: tuple[Array], context: StepContext) -> Any:
        answer = await context.empty(4, "float64", use="output")
        if self.last:
            context.run(np.copyto, np.asarray(answer), 1.0)
        else:
            context.run(slope, np.asarray(saved[0]), np.asarray(gradient[0]), np.asarray(answer))
        return [answer]


def fill(numbers: Floats, first: int) -> None:
    numbers[:] = np.arange(first, first + 4)


def total(numbers: Floats) -> float:
    return float(numbers.sum())


def slope(numbers: Floats, gradient: Floats, answer: Floats) -> None:
    np.multiply(gradient, 2 * numbers, out=answer)
    if answer[0] == 14:
        raise ArithmeticError("seven")


def squares(count: int) -> list[ParallelStage]:
    made = [Square(last=at == count - 1) for at in range(count)]
    return [ParallelStage(one.forward, one.backward, saved=512, output=512) for one in made]


@each_schedule
@pytest.mark.parametrize("count", [1, 2, 4])
def test_real_numbers_are_those_of_the_model(everywhere: Run, schedule: Kind, count: int) -> None:
    """Arrays among plain values go through the stages, on one pool or several, also where only one stage is."""

    async def main() -> None:
        async with AsyncMemoryPool(Host(), limit="16 MiB") as pool, AsyncMemoryPool(Host(), limit="16 MiB") as other:
            for pools in (pool, [pool, other, pool, other][:count]):
                model = PipelineParallel(squares(count), pools, schedule=schedule)
                for _ in range(2):
                    expected = [float(sum((first + at) ** 2 ** (count - 1) for at in range(4))) for first in range(5)]
                    assert await model.run(range(5)) == expected
            assert pool.stats().allocated_bytes == other.stats().allocated_bytes == 0
            assert not pool._opened.budgets

    everywhere(main)


def test_an_error_of_work_that_a_step_queued_is_its_own(everywhere: Run) -> None:
    """What a host stream's work raises comes from the step, although nobody in it awaited the work."""

    async def main() -> None:
        async with AsyncMemoryPool(Host(), limit="16 MiB") as pool:
            with pytest.raises(StepError) as failed:
                await PipelineParallel(squares(2), pool).run(range(9))
            error = failed.value
            assert (error.stage, error.micro_batch, error.forward) == ("stage 0", 7, False)
            assert isinstance(error.__cause__, ArithmeticError)
            await refillable(pool, 16 * MIB)  # what the streams have been given still runs, and holds its arrays
            assert pool.stats().allocated_bytes == 0

    everywhere(main)


def test_what_cannot_be_right_is_refused(everywhere: Run) -> None:
    """At the call, with the argument's name."""

    async def main() -> None:
        async with stepped_pool() as pool:
            model = stages(layers(2))
            with pytest.raises(InvalidRequest, match="stages"):
                PipelineParallel([], pool)
            with pytest.raises(InvalidRequest, match="pools: expected one, or one for each of 2 stages, got 3"):
                PipelineParallel(model, [pool, pool, pool])
            with pytest.raises(InvalidRequest, match="pools: expected a pool or a budget"):
                PipelineParallel(model, ["host", "host"])  # type: ignore[list-item]  # what this is about
            with pytest.raises(InvalidRequest, match="schedule"):
                PipelineParallel(model, pool, schedule="2f2b")  # type: ignore[arg-type]
            with pytest.raises(InvalidRequest, match="ahead"):
                PipelineParallel(model, pool, ahead=0)
            with pytest.raises(InvalidRequest, match="saved"):
                ParallelStage(layers(1)[0].forward, layers(1)[0].backward, saved="much", output=0)
            runner = PipelineParallel(model, pool)
            assert repr(runner) == "<asyncmem.PipelineParallel 1f1b: stage 0 -> stage 1>"
            with pytest.raises(InvalidRequest, match="report"):
                runner.report()
            assert await runner.run([]) == []

    everywhere(main)


def test_one_run_at_a_time(virtually: Run) -> None:
    """A second one would share its streams and its place in memory."""

    async def main() -> None:
        async def again(_: StepContext) -> None:
            with pytest.raises(InvalidRequest, match="one run at a time"):
                await runner.run(range(2))

        async with parallel(layers(2, again)) as (runner, _):
            assert await runner.run(range(2)) == [0, 10]

    virtually(main)


def test_a_stage_gets_no_more_than_it_stated(virtually: Run) -> None:
    """What it asks for beyond is refused in the step, and not waited for."""

    async def main() -> None:
        async def more(context: StepContext) -> None:
            if context.micro_batch == 1:
                context.save(await context.allocate(3 * SAVED, use="saved"))

        async with parallel(layers(2, more)) as (runner, pools):
            with pytest.raises(
                StepError, match=r"in the forward of micro-batch 1: .*has left of what it states as saved"
            ):
                await runner.run(range(3))
            assert [pool.stats().allocated_bytes for pool in pools] == [0, 0]

    virtually(main)


def test_an_answer_that_is_larger_than_stated_is_refused(virtually: Run) -> None:
    """The neighbour has no room for it."""

    async def main() -> None:
        async def forward(_: object, context: StepContext) -> Buffer:
            return await context.allocate(2 * OUTPUT, use="output")

        model = layers(2)
        large = ParallelStage(forward, model[0].backward, saved=SAVED, output=OUTPUT, name="large")
        async with stepped_pool(64 * MIB) as pool:
            with pytest.raises(
                StepError, match=r"'large' failed in the forward .* at most the 1 MiB that 'large' has left"
            ):
                await PipelineParallel([large, stages(model)[1]], pool).run(range(3))
            assert pool.stats().allocated_bytes == 0

    virtually(main)


async def both(_: Any, context: StepContext, *, saved: Use, answered: Use) -> Any:
    one, other = await context.allocate(OUTPUT, use=saved), await context.allocate(OUTPUT, use=answered)
    context.save(one)
    return other


async def tasks_of_its_own(_: Any, context: StepContext) -> Any:
    buffers: list[Buffer] = []

    async def allocate() -> None:
        buffers.append(await context.allocate(OUTPUT, use="saved"))

    async with anyio.create_task_group() as tasks:
        for _ in range(4):
            tasks.start_soon(allocate)
    context.save(*buffers)
    return await context.allocate(OUTPUT, use="output")


async def more_tasks(item: Any, context: StepContext) -> Any:
    await tasks_of_its_own(item, context)
    await context.allocate(1, use="saved")


async def in_pieces(_: Any, context: StepContext) -> Any:
    buffers = [await context.allocate(OUTPUT) for _ in range(4)]
    for buffer in buffers[::2]:
        buffer.free()
    await context.allocate(2 * OUTPUT)


async def handing_on(item: Any, context: StepContext) -> Any:
    return item or await context.allocate(OUTPUT, use="output")


async def nothing(*given: Any) -> Any:
    """A backward without work."""
    context: StepContext = given[-1]
    return await context.allocate(OUTPUT, use="output") if context.stage == "1" else None


async def run_two(forward: Callable[..., Any]) -> None:
    """Run two stages of that forward in one pool."""
    made = [
        ParallelStage(forward, nothing, saved=4 * OUTPUT, output=OUTPUT, working=4 * OUTPUT, name=name) for name in "01"
    ]
    async with stepped_pool(64 * MIB) as pool:
        try:
            for result in await PipelineParallel(made, pool).run([None] * 3):
                result.free()
        finally:
            assert pool.stats().allocated_bytes == 0


@pytest.mark.parametrize(
    ("forward", "told"),
    [
        (partial(both, saved="working", answered="output"), "save.*expected memory allocated as saved"),
        (partial(both, saved="output", answered="working"), "save.*expected memory allocated as saved"),
        (partial(both, saved="saved", answered="working"), "output.*expected memory allocated as output"),
        (partial(both, saved="result", answered="output"), "use: expected"),
        (in_pieces, "the 2 MiB of working that '0' has left are in pieces, got 2 MiB"),
        (handing_on, "'1' failed.*output.*memory allocated as output, as it is a result"),
    ],
)
def test_memory_is_used_as_it_was_asked_for(virtually: Run, forward: Callable[..., Any], told: str) -> None:
    """What later steps need is not kept from them, and what no gap has room for is not waited for."""

    async def main() -> None:
        with pytest.raises(StepError, match=told):
            await run_two(forward)

    virtually(main)


def test_a_step_may_have_tasks_that_allocate(virtually: Run) -> None:
    """They have one place together."""

    async def main() -> None:
        with pytest.raises(StepError, match="at most the 0 B that '0' has left of what it states as saved"):
            await run_two(more_tasks)
        await run_two(tasks_of_its_own)

    virtually(main)


class InPlace(Layer):
    """A stage that works in the memory of what it is given, and returns that."""

    async def forward(self, item: Any, context: StepContext) -> Any:
        if self.at in (0, self.last):
            return await super().forward(item, context)
        stream_of(context).launch(FORWARD, writes=[item])
        return item

    async def backward(self, gradient: Any, saved: tuple[Buffer, ...], context: StepContext) -> Any:
        if self.at in (0, self.last):
            return await super().backward(gradient, saved, context)
        stream_of(context).launch(BACKWARD, writes=[gradient])
        return gradient


@each_schedule
def test_a_step_may_answer_what_it_was_given(virtually: Run, schedule: Kind) -> None:
    """The copy to the neighbour comes behind the work on it, and its memory is free behind the copy."""

    async def main() -> None:
        model = [InPlace(at, 3) for at in range(4)]
        async with parallel(model, devices=machine(4, peer_rate=4 * OUTPUT), schedule=schedule) as (runner, pools):
            assert await runner.run(range(COUNT)) == [number * 10 for number in range(COUNT)]
            assert [pool.stats().allocated_bytes for pool in pools] == [0] * 4
            assert runner.report().overlap > 0

    virtually(main)


def test_no_more_steps_are_queued_than_it_may_be_ahead(virtually: Run) -> None:
    """While the device stands still, a stage queues so many steps and no other; then it goes on."""

    async def main() -> None:
        devices = machine(2)
        clock = devices[0].clock
        assert isinstance(clock, VirtualClock)
        clock.autojump = False
        queued: list[str] = []

        async def count(context: StepContext) -> None:
            queued.append(context.stage)

        async with (
            parallel(layers(2, count), devices=devices, schedule="gpipe", ahead=3) as (runner, _),
            anyio.create_task_group() as tasks,
        ):
            tasks.start_soon(runner.run, range(COUNT))
            await anyio.sleep(1)  # of virtual time, which goes on when nobody has anything to do
            first = sorted(queued)
            while len(queued) < 4 * COUNT:
                devices[0].advance(1)
                await anyio.sleep(1)
            devices[0].run_until_idle()
        assert first == ["stage 0"] * 3 + ["stage 1"] * 3

    virtually(main)


class Fed(Layer):
    """A stage whose first one reads micro-batches that are buffers."""

    async def forward(self, item: Any, context: StepContext) -> Any:
        if self.at == 0:
            stream_of(context).launch(FORWARD / 10, reads=[item])
        return await super().forward(item, context)


def test_micro_batches_may_be_buffers_that_stay_the_callers(virtually: Run) -> None:
    """The first stage comes behind the work that made them, and they are not freed before it is done with them."""

    async def main() -> None:
        devices = machine(2)
        async with parallel([Fed(0, 1), Fed(1, 1)], devices=devices) as (runner, pools):
            stream = devices[0].create_stream()
            fed = [await pools[0].allocate_async(MIB, stream=stream) for _ in range(3)]
            for buffer in fed:
                stream.launch(1, writes=[buffer])
            assert await runner.run(fed) == [0, 10, 20]
            assert all(buffer.alive for buffer in fed)
            for buffer in fed:
                buffer.free()
            elsewhere = await pools[1].allocate_async(MIB)
            with pytest.raises(StepError, match="'stage 0' failed in the forward of micro-batch 0: InvalidRequest"):
                await runner.run([elsewhere])
            elsewhere.free()
            assert [pool.stats().allocated_bytes for pool in pools] == [0, 0]

    virtually(main)


async def as_it_is(item: Any, _: StepContext) -> Any:
    return item


def test_a_micro_batch_stays_the_callers_where_a_step_answers_it(virtually: Run) -> None:
    """The next stage has a copy, and the buffer itself is not freed."""

    async def main() -> None:
        first = ParallelStage(as_it_is, nothing, saved=0, output=OUTPUT, name="0")
        async with parallel(layers(2)) as (_, pools), await pools[0].allocate_async(OUTPUT) as fed:
            assert await PipelineParallel([first, stages(layers(2))[1]], pools).run([fed] * 3) == [0, 10, 20]
            assert fed.alive

    virtually(main)


@each_schedule
def test_a_step_may_wait_for_its_work(everywhere: Run, schedule: Kind) -> None:
    """Then the stage is not ahead of its device, and goes on all the same."""

    async def main() -> None:
        async def wait(context: StepContext) -> None:
            await context.stream.synchronize()

        async with parallel(layers(3, wait), kind=AsyncMemoryPool, schedule=schedule, ahead=1) as (runner, pools):
            assert await runner.run(range(COUNT)) == [number * 10 for number in range(COUNT)]
            assert [pool.stats().allocated_bytes for pool in pools] == [0, 0, 0]

    everywhere(main)


class Mixed(Layer):
    """A stage that saves buffers of many sizes, and works with others."""

    def __init__(self, at: int, last: int, sizes: list[int], output: int) -> None:
        super().__init__(at, last)
        self.sizes = sizes
        self.output = output

    async def forward(self, item: Any, context: StepContext) -> Any:
        saved = [await context.allocate(size, use="saved") for size in self.sizes]
        answer = None if self.at == self.last else await context.allocate(self.output, use="output")
        stream_of(context).launch(FORWARD, writes=[await context.allocate(self.output // 2)])
        context.save(*saved, *([item] if self.at else []))
        return answer

    async def backward(self, gradient: Any, saved: tuple[Buffer, ...], context: StepContext) -> Any:
        answer = await context.allocate(self.output, use="output") if self.at else None
        for size in self.sizes:
            (await context.allocate(min(size, self.output // 2))).free()
        reads = [*saved, *([gradient] if gradient else [])]
        stream_of(context).launch(BACKWARD, reads=reads, writes=[answer] if answer else [])
        return answer

    def stage(self) -> ParallelStage:
        output = 0 if self.at == self.last else self.output
        return ParallelStage(
            self.forward, self.backward, saved=sum(self.sizes), output=output, working=self.output // 2
        )


@each_schedule
@pytest.mark.parametrize("seed", [9, 12, 24, 38])  # of those for which it was too little when gaps were everybody's
def test_the_bound_is_room_for_buffers_of_many_sizes(schedule: Kind, seed: int) -> None:
    """No step waits for memory, so none loses time by it, in pools of just so many bytes."""
    random = Random(seed)
    output = random.randrange(1, 65) << 16
    sizes = [[random.choice([output, 3 * output, 4 * output, output // 2, 8192]) for _ in range(8)] for _ in range(4)]
    model = [Mixed(at, 3, sizes[at], output) for at in range(4)]

    async def main() -> None:
        devices, nowhere = machine(4), stepped_pool()
        needs = PipelineParallel([one.stage() for one in model], [nowhere] * 4, schedule=schedule).needs(COUNT)
        limits = [-(-need // (2 * MIB)) * 2 * MIB for need in needs]
        async with parallel(model, devices=devices, limits=limits, schedule=schedule) as (runner, _):
            await runner.run(range(COUNT))
            assert math.isclose(runner.report().bubble, 3 / (COUNT + 3), rel_tol=1e-6)

    run_steps(main(), StepLoop(max_steps=100_000))


def test_a_report_is_a_table(virtually: Run) -> None:
    """With the figures of the run that came to its end last, units included."""

    async def main() -> None:
        async with parallel(layers(2)) as (runner, _):
            await runner.run(range(8))
            head, titles, *rows = str(runner.report()).splitlines()
        assert head == "1f1b: 8 micro-batches in 27 s, bubble 11.1%, at least 11.1%, 100% of 0 s of copies overlapped"
        assert titles.split() == ["stage", "device", "forward", "backward", "busy", "keeps", "peak", "bound"]
        assert re.fullmatch(r"stage 0  simulated:0      1 s       2 s  88.9%      2  1\d MiB  12 MiB", rows[0])
        assert re.fullmatch(r"stage 1  simulated:1      1 s       2 s  88.9%      1   \d MiB   8 MiB", rows[1])
        assert len(rows) == 2

    virtually(main)


def calls_a_step(count: int) -> float:
    """How many calls a run of so many stages in one pool takes, among its steps."""
    micro_batches = 3

    async def main() -> None:
        limit = count * micro_batches * 8 * MIB
        async with stepped_pool(limit) as pool:
            model = PipelineParallel(stages(layers(count)), pool, schedule="gpipe")
            profile.enable()
            await model.run(range(micro_batches))
            profile.disable()

    profile = cProfile.Profile()
    run_steps(main(), StepLoop(max_steps=10**6))
    return sum(one.callcount for one in profile.getstats()) / (2 * count * micro_batches)


def test_more_stages_do_not_make_each_step_dearer() -> None:
    """What the pool does for a step is in proportion to that, however many places there are."""
    assert calls_a_step(48) < 2 * calls_a_step(6)
