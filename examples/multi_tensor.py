"""A multi-tensor operation: one Adam step over many tensors, whose memory comes all at once or not at all.

The optimizer needs four buffers a tensor (weights, gradient and two moments). Asked for one by one, two optimizers
under one limit could each get half of what they need and wait for the other for ever. A batch is granted whole.
"""

import asyncio
from typing import Any

import numpy as np

import asyncmem
from asyncmem.devices import HostStream

SHAPES = [(512, 512), (512,), (512, 128), (128,)] * 4
KINDS = ("weights", "gradient", "mean", "variance")
STEPS, RATE, BETA1, BETA2, EPSILON = 5, 1e-3, 0.9, 0.999, 1e-8

Floats = np.ndarray[Any, np.dtype[np.float32]]
Tensors = list[dict[str, Floats]]


def start(tensors: Tensors, seed: int) -> None:
    """Set the weights to something and the moments to zero."""
    random = np.random.default_rng(seed)
    for tensor in tensors:
        tensor["weights"][:] = random.standard_normal(tensor["weights"].shape, np.float32)
        tensor["mean"][:] = tensor["variance"][:] = 0


def adam(tensors: Tensors, step: int) -> None:
    """Update all tensors in place, for a loss whose gradient is the weights themselves."""
    for tensor in tensors:
        weights, gradient, mean, variance = (tensor[kind] for kind in KINDS)
        gradient[:] = weights
        mean += (1 - BETA1) * (gradient - mean)
        variance += (1 - BETA2) * (gradient * gradient - variance)
        unbiased_mean, unbiased_variance = mean / (1 - BETA1**step), variance / (1 - BETA2**step)
        weights -= RATE * unbiased_mean / (np.sqrt(unbiased_variance) + EPSILON)


async def optimize(pool: asyncmem.AsyncMemoryPool, stream: HostStream, seed: int) -> list[Floats]:
    """Train one model on a stream of its own, in buffers that are there together."""
    sizes = [4 * int(np.prod(shape)) for shape in SHAPES for _ in KINDS]
    async with pool.allocate_batch(sizes, stream=stream, tag=f"model {seed}") as batch:
        arrays = iter(batch)
        tensors = [{kind: np.asarray(next(arrays).view("float32", shape)) for kind in KINDS} for shape in SHAPES]
        stream.run(start, tensors, seed)
        for step in range(1, STEPS + 1):
            stream.run(adam, tensors, step)
        await stream.synchronize()
        return [tensor["weights"].copy() for tensor in tensors]


def plainly(seed: int) -> list[Floats]:
    """Compute the same in memory of numpy's own."""
    tensors = [{kind: np.empty(shape, np.float32) for kind in KINDS} for shape in SHAPES]
    start(tensors, seed)
    for step in range(1, STEPS + 1):
        adam(tensors, step)
    return [tensor["weights"] for tensor in tensors]


async def main() -> None:
    """Optimize more models at once than there is memory for, and compare with plain numpy."""
    models = 6
    host = asyncmem.Host()
    async with asyncmem.AsyncMemoryPool(host, limit="64 MiB", segment_size="8 MiB") as pool:
        results = await asyncio.gather(*(optimize(pool, host.create_stream(), seed) for seed in range(models)))
        stats = pool.stats()

    print(f"{models} models of {len(SHAPES) * len(KINDS)} buffers each; {stats.waits} waited until theirs were there")
    print(f"peak {stats.peak_reserved >> 20} MiB reserved, {stats.num_allocations} buffers in all")
    for seed, weights in enumerate(results):
        assert all(map(np.array_equal, weights, plainly(seed)))


if __name__ == "__main__":
    asyncmem.run(main)
