"""Arrays of torch or CuPy over a pool's memory, without a copy; where there is no GPU, of numpy.

Batches are normalized by the array library, in place, in buffers of the pool, which waits when all are in use. Each
task has a stream of the library's own. Nothing synchronizes the two sides: DLPack says which stream works on a buffer,
and the buffer's memory is used again only behind it.
"""

import asyncio
import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import numpy as np

import asyncmem

ROWS, COLUMNS, BATCHES, TASKS = 2000, 64, 24, 6
SIZE = ROWS * COLUMNS * 4

Floats = np.ndarray[Any, np.dtype[np.float32]]
Tensor = Any  # an array of whichever library it is


class Library(NamedTuple):
    """An array library and how it speaks of streams; its arrays know numpy's operators."""

    name: str
    device: str
    new_stream: Callable[[], Any]
    use: Callable[[Any], AbstractContextManager[object]]
    from_dlpack: Callable[[asyncmem.Array], Tensor]


def find() -> Library:
    """Return the first library that can be used here."""
    for find_one in (_torch, _cupy):
        try:
            return find_one()
        except (ImportError, RuntimeError):
            continue  # not installed, or no GPU for it
    return Library("numpy", "host", lambda: None, lambda _: nullcontext(), np.from_dlpack)


def _torch() -> Library:
    torch: Any = importlib.import_module("torch")
    if not torch.cuda.is_available():
        raise RuntimeError("torch finds no GPU")
    return Library("torch", "cuda:0", torch.cuda.Stream, torch.cuda.stream, torch.from_dlpack)


def _cupy() -> Library:
    cupy: Any = importlib.import_module("cupy")
    cupy.cuda.runtime.getDeviceCount()
    return Library("cupy", "cuda:0", lambda: cupy.cuda.Stream(non_blocking=True), lambda s: s, cupy.from_dlpack)


def batch(number: int) -> Floats:
    """Return a batch as it comes from a disk or a network."""
    return np.random.default_rng(number).normal(number, 1 + number, (ROWS, COLUMNS)).astype(np.float32)


def normalize(x: Tensor) -> Tensor:
    """Give each column the mean 0 and the deviation 1, in place; return the columns' former means."""
    means = x.mean(0)
    x -= means
    x /= (x * x).mean(0) ** 0.5
    return means


async def work(pool: asyncmem.AsyncMemoryPool, library: Library, numbers: range) -> list[tuple[Floats, Floats]]:
    """Normalize some batches; return what became of each, and its means."""
    stream = library.new_stream()
    results = []
    for number in numbers:
        source, target = batch(number), np.empty((ROWS, COLUMNS), np.float32)
        async with pool.allocate_async(SIZE, stream=stream, tag="batch") as buffer:
            home = buffer.stream
            pool.device.copy_in(buffer.address, source.data.cast("B"), home)
            await home.synchronize()  # numpy has no streams, and the source may go now
            with library.use(stream):
                means = normalize(library.from_dlpack(buffer.view("float32", source.shape)))
            # The library's own memory comes in the same way: behind its work, on the stream that is named.
            taken = asyncmem.asarray(means, stream=home)
            found = np.empty(COLUMNS, np.float32)
            pool.device.copy_out(found.data.cast("B"), taken.buffer.address, home)
            pool.device.copy_out(target.data.cast("B"), buffer.address, home)
            await home.synchronize()
            taken.buffer.free()
        results.append((target, found))
    return results


async def main() -> None:
    """Run more tasks than there are buffers, and compare with plain numpy."""
    library = find()
    async with asyncmem.AsyncMemoryPool(library.device, limit="2 MiB", segment_size="2 MiB") as pool:
        shares = [range(first, BATCHES, TASKS) for first in range(TASKS)]
        done = await asyncio.gather(*(work(pool, library, numbers) for numbers in shares))
        stats = pool.stats()

    print(f"{BATCHES} batches of {SIZE >> 10} KiB by {library.name} on {library.device}, {stats.waits} waited")
    print(f"peak {stats.peak_reserved >> 20} MiB reserved, {stats.exported_bytes} bytes still exported")
    for numbers, results in zip(shares, done, strict=True):
        for number, (normalized, means) in zip(numbers, results, strict=True):
            expected = batch(number)
            assert np.allclose(means, normalize(expected), atol=1e-3)
            assert np.allclose(normalized, expected, atol=1e-3)
    assert stats.exported_bytes == 0


if __name__ == "__main__":
    asyncmem.run(main)
