"""Pipeline parallelism: micro-batches go through three stages, each a layer on a stream of its own.

While stage 2 works on one micro-batch, stage 1 works on the next. An activation is handed over from stream to stream:
the next stage waits for it on the device, its memory comes back in the order of whoever uses it last, and no task ever
waits for a stage except at the end. Memory for a few micro-batches is enough for all of them.
"""

import asyncio
from typing import Any

import numpy as np

import asyncmem
from asyncmem.devices import HostStream

MICRO_BATCHES = 64
ROWS, WIDTH = 64, 512
NBYTES = ROWS * WIDTH * 4
LIMIT = 16 * NBYTES

Floats = np.ndarray[Any, np.dtype[np.float32]]


def layer(inputs: Floats, weights: Floats, outputs: Floats) -> None:
    """One stage's work: a matrix product and a ReLU."""
    np.matmul(inputs, weights, out=outputs)
    np.maximum(outputs, 0, out=outputs)


def fill(number: int, outputs: Floats) -> None:
    """Make up the micro-batch of that number."""
    outputs[:] = np.random.default_rng(number).standard_normal(outputs.shape, np.float32)


def floats(buffer: asyncmem.Buffer) -> Floats:
    """See a buffer as a matrix."""
    return np.asarray(buffer.view("float32", (ROWS, WIDTH)))


async def micro_batch(
    pool: asyncmem.AsyncMemoryPool, stages: list[HostStream], weights: list[Floats], number: int
) -> float:
    """Queue one micro-batch through all stages and wait for its end."""
    # Input and output of every step are asked for together: whoever waits for memory here holds none.
    buffers = await pool.allocate_batch([NBYTES, NBYTES], stream=stages[0], tag="activations")
    source, target = buffers
    stages[0].run(fill, number, floats(source))
    for stage, matrix in zip(stages, weights, strict=True):
        source.hand_over(stage)  # `stage` waits for whoever wrote it, and is its home from now on
        target.hand_over(stage)
        stage.run(layer, floats(source), matrix, floats(target))
        source, target = target, source
    result = await stages[-1].run(lambda outputs: float(outputs.sum()), floats(source))
    buffers.free()
    return result


def plainly(weights: list[Floats], number: int) -> float:
    """Compute the same without streams and pool."""
    source, target = np.empty((2, ROWS, WIDTH), np.float32)
    fill(number, source)
    for matrix in weights:
        layer(source, matrix, target)
        source, target = target, source
    return float(source.sum())


async def main() -> None:
    """Send all micro-batches off at once, and compare with plain numpy."""
    scale = np.float32(WIDTH**-0.5)
    weights = [np.random.default_rng(seed).standard_normal((WIDTH, WIDTH), np.float32) * scale for seed in range(3)]
    host = asyncmem.Host()
    stages = [host.create_stream(f"stage {number}") for number in range(3)]
    async with asyncmem.AsyncMemoryPool(host, limit=LIMIT) as pool:
        results = await asyncio.gather(*(micro_batch(pool, stages, weights, n) for n in range(MICRO_BATCHES)))
        stats = pool.stats()

    print(f"{MICRO_BATCHES} micro-batches of 2 x {NBYTES >> 10} KiB went through {LIMIT >> 20} MiB on three stages")
    print(f"{stats.waits} of them waited for memory; peak {stats.peak_reserved >> 10} KiB reserved")
    assert results == [plainly(weights, number) for number in range(MICRO_BATCHES)]
    assert stats.waits > 0
    assert stats.peak_reserved <= LIMIT


if __name__ == "__main__":
    asyncmem.run(main)
