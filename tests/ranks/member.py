"""A process of a group, which does what a test tells it; run as a program. The model that it trains is here, too."""

from __future__ import annotations

import os
import signal
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

sys.path.append(str(Path(__file__).parents[2]))  # last: asyncmem is the installed one

import anyio
import numpy as np

from asyncmem import AsyncMemoryPool
from asyncmem.errors import StepError
from asyncmem.pipeline.parallel import ParallelStage, PipelineParallel
from asyncmem.ranks import Ranks
from tests.share.peer import Actions, main

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from asyncmem import Array
    from asyncmem.pipeline.parallel import Step, StepContext

WIDTH = 1000
MICRO_BATCHES = 6
LIMIT = "4 MiB"


class Layer:
    """A stage: weights times the input and a squared part, on the host; its gradients are added up."""

    def __init__(self, at: int, count: int) -> None:
        self.at = at
        self.last = at == count - 1
        self.weights = np.random.default_rng(at).standard_normal(WIDTH)
        self.gradient = np.zeros(WIDTH)
        self.on_step: Callable[[Step], None] = nothing

    async def forward(self, item: Any, context: StepContext) -> Any:
        self.on_step(context.step)
        if self.at:
            given = item["numbers"]
            assert item["plain"] == (context.micro_batch, None, "text", 0.1, b"\0\1")
        else:
            given = await context.empty(WIDTH, "float64", use="saved")
            context.run(fill, np.asarray(given), item)
        context.save(given)
        answer = await context.empty(WIDTH, "float64", use="output")
        context.run(forward, self.weights, np.asarray(given), np.asarray(answer))
        plain = (context.micro_batch, None, "text", 0.1, b"\0\1")
        return answer if self.last else {"numbers": answer, "plain": plain}

    async def backward(self, gradient: Any, saved: tuple[Array], context: StepContext) -> Any:
        self.on_step(context.step)
        answer = await context.empty(WIDTH, "float64", use="output")
        given = None if gradient is None else np.asarray(gradient[0])
        context.run(backward, self, np.asarray(saved[0]), given, np.asarray(answer))
        return [answer]


def fill(numbers: Any, seed: int) -> None:
    numbers[:] = np.random.default_rng(seed).standard_normal(WIDTH)


def forward(weights: Any, given: Any, answer: Any) -> None:
    np.multiply(weights, given, out=answer)
    answer += np.sin(given)


def backward(layer: Layer, given: Any, gradient: Any, answer: Any) -> None:
    slope = np.ones(WIDTH) if gradient is None else gradient
    layer.gradient += slope * given
    np.multiply(slope, layer.weights + np.cos(given), out=answer)


def stages(layers: list[Layer]) -> list[ParallelStage]:
    return [ParallelStage(one.forward, one.backward, saved=8 * WIDTH, output=8 * WIDTH + 512) for one in layers]


Trouble: TypeAlias = tuple[str, int, int]
"""What is to happen in a run, and at which stage's so many-th step: "fail", "cancel" or "kill"."""


async def train(
    layers: list[Layer],
    own: range,
    ranks: Ranks | None,
    runs: Sequence[Trouble | None] = (None,),
    schedule: Any = "1f1b",
    micro_batches: int = MICRO_BATCHES,
) -> list[Any]:
    """Run the stages of one process, and return what each run came to: results and gradients, or how it failed."""
    outcomes: list[Any] = []
    async with AsyncMemoryPool("host", limit=LIMIT, share_limit=LIMIT) as pool:
        pools = [pool if at in own else None for at in range(len(layers))]
        model = PipelineParallel(stages(layers), pools, schedule=schedule, link=ranks)
        for trouble in runs:
            for layer in layers:
                layer.gradient[:] = 0
            with anyio.CancelScope() as scope:
                if trouble is not None:
                    what, stage, step = trouble
                    layers[stage].on_step = partial(happen, what, step, iter(range(2 * micro_batches)), scope)
                try:
                    found = await model.run(range(micro_batches))
                except StepError as error:
                    outcomes.append((error.stage, error.micro_batch, error.forward, error.reason))
                else:
                    results = [one.numpy().tobytes() for one in found]
                    for one in found:
                        one.free()
                    outcomes.append((results, [layers[at].gradient.tobytes() for at in own]))
                    assert len(model.report().stages) == len(layers)
            if scope.cancelled_caught:
                outcomes.append("cancelled")
            for layer in layers:
                layer.on_step = nothing
            await all_is_free(pool)
    return outcomes


def nothing(step: Step) -> None:
    """Let a step be taken."""


def happen(what: str, at: int, numbers: Iterator[int], scope: anyio.CancelScope, step: Step) -> None:
    """Make the trouble, if it is the step for that."""
    del step
    if next(numbers) == at:
        if what == "fail":
            raise ArithmeticError("seven")
        if what == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        scope.cancel()


async def all_is_free(pool: AsyncMemoryPool) -> None:
    """See that all memory comes back; what the streams have been given still runs, and others let go of it soon."""
    with anyio.fail_after(60):
        while any(one.allocated_bytes or one.pinned_bytes for one in (pool.stats(), pool.shared.stats())):  # noqa: ASYNC110  # another process is waited for
            await anyio.sleep(0.001)


class MemberActions(Actions):
    """What a member can do."""

    def train(self, key: str, rank: int, size: int, own: range, count: int, *more: Any) -> Any:
        """Train the stages of one rank."""

        async def work() -> Any:
            async with Ranks(key, rank, size, timeout=30) as ranks:
                return await train([Layer(at, count) for at in range(count)], own, ranks, *more)

        return anyio.run(work)

    def add(self, key: str, rank: int, size: int, shape: tuple[int, ...], dtype: str, times: int) -> Any:
        """Add up arrays of the ranks, and return their bytes."""

        async def work() -> Any:
            async with (
                AsyncMemoryPool("host", limit=LIMIT, share_limit=LIMIT) as pool,
                Ranks(key, rank, size, timeout=30) as ranks,
                pool.empty(shape, dtype) as one,
                pool.empty(7, "int64") as other,
            ):
                one.numpy()[...] = numbers_of(rank, shape).astype(dtype)
                other.numpy()[:] = rank + 1
                for _ in range(times):
                    await ranks.all_reduce(pool, [one, other])
                return one.numpy().tobytes(), other.numpy().tolist()

        return anyio.run(work)

    def meet(self, key: str, rank: int, size: int, timeout: float, then: str) -> Any:
        """Join a group, and leave it: at once, or when it is told so."""

        async def work() -> Any:
            async with Ranks(key, rank, size, timeout=timeout) as ranks:
                return repr(ranks) + then

        return anyio.run(work)


def numbers_of(rank: int, shape: tuple[int, ...]) -> Any:
    """Return what a rank adds."""
    return np.random.default_rng(rank).standard_normal(shape) * 1000


if __name__ == "__main__":
    main(MemberActions)
