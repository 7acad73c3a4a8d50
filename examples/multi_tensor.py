"""A multi-tensor operation: Adam steps over 400 tensors at once, in memory that comes all together or not at all.

Weights, gradients and two moments of all tensors lie in one range, kind by kind. A step is then a dozen operations,
each in one sweep, where tensor by tensor it is a dozen for each of them; the results are the same to the last bit.
Models that do not fit beside each other wait, and none holds a part of what another one needs.

The arrays are torch's or CuPy's on a GPU, and numpy's where there is none.
"""

import asyncio
import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import numpy as np

import asyncmem
from asyncmem.devices import Device, Host, HostStream

SHAPES = [(64, 32), (64,), (10, 64), (10,)] * 100
KINDS = ("weights", "gradients", "means", "variances")
MODELS, STEPS, RATE, BETA1, BETA2, EPSILON = 6, 5, 1e-3, 0.9, 0.999, 1e-8

Floats = np.ndarray[Any, np.dtype[np.float32]]
Tensor = Any  # an array of whichever library it is


class Library(NamedTuple):
    """An array library, and how it is given work; its arrays know numpy's operators."""

    name: str
    device: str | Device
    new_stream: Callable[[], Any]
    submit: Callable[..., object]
    view: Callable[[asyncmem.Array], Tensor]
    own: Callable[[Floats], Tensor]
    read: Callable[[Tensor], Floats]


def find() -> Library:
    """Return the first library that can be used here."""
    for find_one in (_torch, _cupy):
        try:
            return find_one()
        except (ImportError, RuntimeError):
            continue  # not installed, or no GPU for it
    host = Host()
    return Library("numpy", host, host.create_stream, HostStream.run, asyncmem.Array.numpy, np.copy, np.copy)


def _torch() -> Library:
    torch: Any = importlib.import_module("torch")
    if not torch.cuda.is_available():
        raise RuntimeError("torch finds no GPU")
    submit = _within(torch.cuda.stream)
    return Library(
        "torch",
        "cuda:0",
        torch.cuda.Stream,
        submit,
        torch.from_dlpack,
        own=lambda array: torch.tensor(array, device="cuda"),
        read=lambda tensor: tensor.cpu().numpy(),
    )


def _cupy() -> Library:
    cupy: Any = importlib.import_module("cupy")
    cupy.cuda.runtime.getDeviceCount()
    submit = _within(lambda stream: stream)
    return Library(
        "cupy",
        "cuda:0",
        lambda: cupy.cuda.Stream(non_blocking=True),
        submit,
        cupy.from_dlpack,
        cupy.asarray,
        cupy.asnumpy,
    )


def _within(current: Callable[[Any], AbstractContextManager[object]]) -> Callable[..., object]:
    """Make what submits work to a stream by making it the library's current one."""

    def submit(stream: object, work: Callable[..., object], *arguments: object) -> None:
        with current(stream):
            work(*arguments)

    return submit


def adam(weights: Tensor, gradients: Tensor, means: Tensor, variances: Tensor, step: int) -> None:
    """Update in place, for a loss whose gradient is the weights themselves."""
    gradients[:] = weights
    means += (gradients - means) * (1 - BETA1)
    variances += (gradients * gradients - variances) * (1 - BETA2)
    deviations = (variances / (1 - BETA2**step)) ** 0.5
    weights -= means / (1 - BETA1**step) / (deviations + EPSILON) * RATE


def size_of_kind(arrays: asyncmem.ArrayBatch) -> int:
    """Return how many numbers there are from the first weight to the last."""
    last = arrays[len(SHAPES) - 1]
    return last.offset // 4 + last.size


def train(library: Library, arrays: asyncmem.ArrayBatch) -> None:
    """Train all tensors at once: each kind is one range of the memory, with small gaps of zeros in it."""
    everything, size, span = library.view(arrays.flat), size_of_kind(arrays), arrays[len(SHAPES)].offset // 4
    weights, gradients, means, variances = (everything[at * span : at * span + size] for at in range(len(KINDS)))
    means[:] = variances[:] = 0
    for step in range(1, STEPS + 1):
        adam(weights, gradients, means, variances, step)


def initial(seed: int) -> list[Floats]:
    """Return the weights of an untrained model."""
    random = np.random.default_rng(seed)
    return [random.standard_normal(shape, np.float32) for shape in SHAPES]


async def optimize(pool: asyncmem.AsyncMemoryPool, library: Library, seed: int) -> list[Floats]:
    """Train one model on a stream of its own."""
    stream = library.new_stream()
    async with pool.empty_batch(SHAPES * len(KINDS), stream=stream, tag=f"model {seed}") as arrays:
        packed = np.zeros(size_of_kind(arrays), np.float32)
        weights = [packed[one.offset // 4 :][: one.size].reshape(one.shape) for one in arrays[: len(SHAPES)]]
        for weight, value in zip(weights, initial(seed), strict=True):
            weight[:] = value
        there = arrays.buffer.view("float32", packed.shape)
        await there.copy_from(packed)
        library.submit(stream, train, library, arrays)
        await there.copy_to(packed)
    return weights


def plainly(library: Library, seed: int) -> list[Floats]:
    """Train tensor by tensor, in memory of the library's own."""
    results = []
    for value in initial(seed):
        weights, gradient, mean, variance = (library.own(one) for one in (value, *[np.zeros_like(value)] * 3))
        for step in range(1, STEPS + 1):
            adam(weights, gradient, mean, variance, step)
        results.append(library.read(weights))
    return results


async def main() -> None:
    """Train more models at once than there is memory for, and compare with one tensor after the other."""
    library = find()
    async with asyncmem.AsyncMemoryPool(library.device, limit="16 MiB", segment_size="4 MiB") as pool:
        results = await asyncio.gather(*(optimize(pool, library, seed) for seed in range(MODELS)))
        stats = pool.stats()

    print(f"{MODELS} models of {len(SHAPES)} tensors by {library.name}; {stats.waits} waited until theirs were there")
    print(f"peak {stats.peak_reserved >> 20} MiB reserved; each step was one sweep over all tensors of a model")
    for seed, weights in enumerate(results):
        assert all(map(np.array_equal, weights, plainly(library, seed)))


if __name__ == "__main__":
    asyncmem.run(main)
