"""Pipeline parallelism on cards: what comes to a stage was sent to it, the bubble is the schedule's, sums are exact."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack
from typing import Any, Literal

import pytest

from asyncmem import Array, AsyncMemoryPool, Buffer
from asyncmem.pipeline.parallel import ParallelReport, ParallelStage, PipelineParallel, StepContext, Use

from .card import Card, Number

MICRO_BATCHES = 8
SIZE = 1 << 20
Kind = Literal["1f1b", "eager", "gpipe"]

each_schedule = pytest.mark.parametrize("schedule", ["1f1b", "eager", "gpipe"])


@pytest.fixture(params=[1, 2, 4], ids=lambda count: f"{count}-gpu")
def cards(request: pytest.FixtureRequest, driver: Any) -> Iterator[list[Card]]:
    """So many cards; a real machine with fewer skips the test."""
    if driver is not None:
        driver.devices(request.param)
    first = Card()
    if first.device.driver.call("cuDeviceGetCount") < request.param:
        first.close()
        pytest.skip(f"needs {request.param} GPUs")
    found = [first, *(Card(index) for index in range(1, request.param))]
    yield found
    for card in found:
        card.enter()
        card.close()
    if driver is not None:
        assert driver.violations() == []


async def run(
    cards: Sequence[Card], stages: Sequence[ParallelStage], schedule: Kind, see: Callable[[list[Any]], None]
) -> ParallelReport:
    """Run a model with a stage on each card in turn, and look at its results; the pools are empty afterwards."""
    async with AsyncExitStack() as stack:
        pools = []
        for card in cards:
            others = [other.device for other in cards if other is not card]
            pool = AsyncMemoryPool(
                card.device, limit="256 MiB", segment_size="256 MiB", pregrow="256 MiB", peers=others
            )
            await stack.enter_async_context(pool)
            await pool.wait()
            pools.append(pool)
        model = PipelineParallel(stages, [pools[at % len(pools)] for at in range(len(stages))], schedule=schedule)
        await model.run(range(2))  # what a first use of a stream or a kernel costs is not the schedule's
        see(await model.run(range(MICRO_BATCHES)))
        for pool in pools:
            assert pool.stats().allocated_bytes == 0
            pool.check()
        return model.report()


class Marked:
    """A stage that writes numbers of its own, and looks whether those of its neighbours have come."""

    def __init__(self, card: Card, at: int, last: int, wrong: Number, hold_ns: int) -> None:
        self.card = card
        self.at = at
        self.last = last
        self.wrong = wrong
        self.hold_ns = hold_ns
        self.gate = card.number()  # never opened: it holds for as long as it is told to

    def stage(self) -> ParallelStage:
        output = 0 if self.at == self.last else SIZE
        return ParallelStage(self.forward, self.backward, saved=SIZE, output=output)

    async def forward(self, item: Buffer | int, context: StepContext) -> Buffer | None:
        number = context.micro_batch
        saved = await context.allocate(SIZE, use="saved")
        answer = None if self.at == self.last else await context.allocate(SIZE, use="output")
        stream = context.stream.handle
        self.card.enter()
        self.card.hold(stream, self.gate, limit=self.hold_ns)
        self.card.fill(stream, saved, mark(self.at, number, 1))
        if isinstance(item, Buffer):
            self.card.compare(stream, item, mark(self.at - 1, number, 2), self.wrong)
        if answer is not None:
            self.card.fill(stream, answer, mark(self.at, number, 2))
        context.save(saved, item)
        return answer

    async def backward(
        self, gradient: Buffer | None, saved: tuple[Buffer, Buffer | int], context: StepContext
    ) -> Buffer | None:
        number, (own, item) = context.micro_batch, saved
        answer = await context.allocate(SIZE, use="output") if self.at else None
        stream = context.stream.handle
        self.card.enter()
        self.card.hold(stream, self.gate, limit=2 * self.hold_ns)
        self.card.compare(stream, own, mark(self.at, number, 1), self.wrong)
        if isinstance(item, Buffer):
            self.card.compare(stream, item, mark(self.at - 1, number, 2), self.wrong)
        if gradient is not None:
            self.card.compare(stream, gradient, mark(self.at + 1, number, 3), self.wrong)
        if answer is not None:
            self.card.fill(stream, answer, mark(self.at, number, 3))
        return answer


def mark(stage: int, micro_batch: int, what: int) -> int:
    """A number that nobody else writes."""
    return what << 24 | stage << 16 | micro_batch


def marked(cards: Sequence[Card], count: int, hold_ns: int) -> tuple[list[ParallelStage], list[Number]]:
    wrong = [cards[at % len(cards)].number() for at in range(count)]
    made = [Marked(cards[at % len(cards)], at, count - 1, wrong[at], hold_ns) for at in range(count)]
    return [one.stage() for one in made], wrong


@each_schedule
def test_what_comes_to_a_stage_is_what_was_sent_to_it(cards: list[Card], schedule: Kind) -> None:
    """Activations, gradients and what is saved are whole at each of four stages, on one card and on several."""
    stages, wrong = marked(cards, 4, hold_ns=100_000)
    asyncio.run(run(cards, stages, schedule, lambda _: None))
    for card in cards:
        card.enter()
        card.synchronize()
    assert [number.value for number in wrong] == [0] * 4


@each_schedule
def test_equal_stages_are_idle_no_longer_than_their_schedule_says(
    cards: list[Card], schedule: Kind, driver: object
) -> None:
    """A stage on each card: within 5 % of the formula's bubble."""
    if driver is not None or len(cards) == 1:
        pytest.skip("needs GPUs, which take their time")
    count = len(cards)
    stages, _ = marked(cards, count, hold_ns=20_000_000)
    report = asyncio.run(run(cards, stages, schedule, lambda _: None))
    assert report.bubble <= 1.05 * (count - 1) / (MICRO_BATCHES + count - 1), str(report)


class TorchLayers:
    """Square layers with a ReLU on one card, by torch; gradients of the weights are summed up as they come."""

    def __init__(self, torch: Any, index: int, seeds: Sequence[int], *, first: bool, last: bool) -> None:
        self.torch = torch
        self.device = torch.device("cuda", index)
        self.first, self.last = first, last
        self.weights = [self.made(seed, WIDTH, WIDTH) / WIDTH for seed in seeds]
        self.gradients = [torch.zeros_like(weight) for weight in self.weights]
        torch.cuda.synchronize(self.device)

    def made(self, seed: int, *shape: int) -> Any:
        """Numbers that are the same on every card."""
        generator = self.torch.Generator().manual_seed(seed)
        return self.torch.randn(shape, generator=generator).to(self.device)

    def ahead(self, at: int, inputs: Any, outputs: Any) -> None:
        self.torch.matmul(inputs, self.weights[at], out=outputs)
        outputs.relu_()

    def back(self, at: int, inputs: Any, outputs: Any, gradient: Any, answer: Any) -> None:
        slope = gradient * (outputs > 0)
        self.torch.matmul(slope, self.weights[at].T, out=answer)
        self.gradients[at] += inputs.T @ slope

    def on(self, context: StepContext) -> Any:
        return self.torch.cuda.stream(self.torch.cuda.ExternalStream(context.stream.handle, self.device))

    async def forward(self, item: Array | int, context: StepContext) -> Array:
        count = len(self.weights) + self.first
        result: Use = "output" if self.last else "saved"  # saved too, as the backward asks whether it is above zero
        arrays = [await context.empty((ROWS, WIDTH), use="saved" if at < count - 1 else result) for at in range(count)]
        if isinstance(item, Array):
            arrays.insert(0, item)
        with self.on(context):
            seen = [self.torch.from_dlpack(array) for array in arrays]
            if self.first:
                seen[0].copy_(self.made(1000 + context.micro_batch, ROWS, WIDTH))
            for at in range(len(self.weights)):
                self.ahead(at, seen[at], seen[at + 1])
        context.save(*arrays)
        return arrays[-1]

    async def backward(self, gradient: Array | None, saved: tuple[Array, ...], context: StepContext) -> Array:
        arrays = [
            await context.empty((ROWS, WIDTH), use="working" if at else "output") for at in range(len(self.weights))
        ]
        with self.on(context):
            seen = [self.torch.from_dlpack(array) for array in saved]
            current = seen[-1] if gradient is None else self.torch.from_dlpack(gradient)
            for at in reversed(range(len(self.weights))):
                answer = self.torch.from_dlpack(arrays[at])
                self.back(at, seen[at], seen[at + 1], current, answer)
                current = answer
        for array in arrays[1:]:
            array.buffer.free()
        return arrays[0]

    def stage(self) -> ParallelStage:
        layers = len(self.weights)
        return ParallelStage(
            self.forward,
            self.backward,
            saved=(layers + 1) * 4 * ROWS * WIDTH,
            output=4 * ROWS * WIDTH,
            working=layers * 4 * ROWS * WIDTH,
        )


ROWS, WIDTH, LAYERS = 256, 512, 4


@each_schedule
@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.may_block
def test_gradients_are_those_of_the_model_in_one_piece(
    cards: list[Card], schedule: Kind, count: int, driver: object, request: pytest.FixtureRequest
) -> None:
    """Two and four stages of torch's layers, on one card and on several, give the bits of one loop without them."""
    if driver is not None:
        pytest.skip("torch's kernels need a GPU")
    torch = request.getfixturevalue("torch")
    whole = TorchLayers(torch, 0, range(LAYERS), first=True, last=True)
    for number in [*range(2), *range(MICRO_BATCHES)]:  # the first two are those of the trial run
        seen = [whole.made(1000 + number, ROWS, WIDTH)]
        for at in range(LAYERS):
            seen.append(torch.empty_like(seen[0]))
            whole.ahead(at, seen[at], seen[at + 1])
        current = seen[-1]
        for at in reversed(range(LAYERS)):
            answer = torch.empty_like(current)
            whole.back(at, seen[at], seen[at + 1], current, answer)
            current = answer
    each = LAYERS // count
    parts = [
        TorchLayers(torch, at % len(cards), range(at * each, at * each + each), first=at == 0, last=at == count - 1)
        for at in range(count)
    ]

    def see(results: list[Any]) -> None:
        with_last = torch.from_dlpack(results[-1]).to(whole.device)
        assert torch.equal(with_last, seen[-1])
        for result in results:
            result.buffer.free()

    asyncio.run(run(cards, [part.stage() for part in parts], schedule, see))
    gradients = [gradient.to(whole.device) for part in parts for gradient in part.gradients]
    assert all(map(torch.equal, gradients, whole.gradients))
