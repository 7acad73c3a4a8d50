"""Pipeline parallelism over two processes: each has one of two stages, and both together the bits of one process.

On GPUs it is the same: each process opens a pool on its own GPU, and with `nccl4py` the data goes by NCCL. Here a stage
is numpy's work on the host, and the data goes by shared memory.
"""

import asyncio
import hashlib
import secrets
import sys
from typing import Any

import numpy as np

import asyncmem
from asyncmem.pipeline.parallel import ParallelStage, PipelineParallel, StepContext
from asyncmem.ranks import Ranks

MICRO_BATCHES, ROWS, WIDTH = 8, 64, 256
NBYTES = 4 * ROWS * WIDTH

Floats = np.ndarray[Any, np.dtype[np.float32]]


class Layer:
    """A product with weights and a ReLU, and the sum of the weights' gradients."""

    def __init__(self, at: int) -> None:
        self.first = at == 0
        self.weights = np.random.default_rng(at).standard_normal((WIDTH, WIDTH), np.float32) / np.float32(16)
        self.gradient = np.zeros_like(self.weights)

    async def forward(self, item: asyncmem.Array | int, context: StepContext) -> asyncmem.Array:
        """Queue the way forward."""
        if isinstance(item, int):
            x = await context.empty((ROWS, WIDTH), use="saved")
            context.run(load, item, np.asarray(x))
        else:
            x = item
        y = await context.empty((ROWS, WIDTH), use="output")
        context.run(forward, self.weights, np.asarray(x), np.asarray(y))
        context.save(x)
        return y

    async def backward(
        self, gradient: asyncmem.Array | None, saved: tuple[asyncmem.Array], context: StepContext
    ) -> asyncmem.Array:
        """Queue the backward pass; the last stage's gradient is that of the sum of its outputs."""
        answer = await context.empty((ROWS, WIDTH), use="output")
        given = np.ones((ROWS, WIDTH), np.float32) if gradient is None else np.asarray(gradient)
        context.run(backward, self, np.asarray(saved[0]), given, np.asarray(answer))
        return answer

    def stage(self) -> ParallelStage:
        """State what a micro-batch takes."""
        return ParallelStage(self.forward, self.backward, saved=NBYTES, output=NBYTES)


def load(number: int, x: Floats) -> None:
    """Make up the micro-batch of that number."""
    x[:] = np.random.default_rng((7, number)).standard_normal(x.shape, np.float32)


def forward(weights: Floats, x: Floats, y: Floats) -> None:
    """Fill `y`."""
    np.matmul(x, weights, out=y)
    np.maximum(y, 0, out=y)


def backward(layer: Layer, x: Floats, gradient: Floats, answer: Floats) -> None:
    """Add to the layer's gradient, and fill `answer` with that of `x`."""
    masked = gradient * (x @ layer.weights > 0)
    layer.gradient += x.T @ masked
    np.matmul(masked, layer.weights.T, out=answer)


async def train(own: range, ranks: Ranks | None) -> list[str]:
    """Train the stages of this process, and return a digest of each stage's gradient."""
    layers = [Layer(at) for at in range(2)]
    async with asyncmem.AsyncMemoryPool("host", limit="16 MiB", share_limit="4 MiB") as pool:
        pools = [pool if at in own else None for at in range(2)]
        model = PipelineParallel([one.stage() for one in layers], pools, link=ranks)
        results = await model.run(range(MICRO_BATCHES))  # empty where the last stage is not
        for result in results:
            result.free()
    return [hashlib.sha256(layers[at].gradient.tobytes()).hexdigest() for at in own]


async def one_of_two(key: str, rank: int) -> None:
    """Be one of the processes, and print the digest."""
    async with Ranks(key, rank, 2) as ranks:
        print(*await train(range(rank, rank + 1), ranks))


async def main() -> None:
    """Start both, and compare."""
    key = secrets.token_hex()
    processes = [
        await asyncio.create_subprocess_exec(sys.executable, __file__, "--rank", key, str(rank), stdout=-1)
        for rank in (0, 1)
    ]
    found = [(await process.communicate())[0].decode().strip() for process in processes]
    assert found == await train(range(2), None)
    print("the gradients of two processes are those of one, bit for bit")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        asyncmem.run(one_of_two(sys.argv[2], int(sys.argv[3])))
    else:
        asyncmem.run(main)
