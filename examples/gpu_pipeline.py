"""A producer and a consumer on two streams of a GPU, with torch or CuPy; where there is no GPU, with numpy on the host.

The producer reads batches and copies them to the GPU while the consumer's kernels run on those before. A batch changes
hands by `hand_over`: the consumer's stream waits for the copy, and nothing waits on the host. The pool has room for
four batches, so a faster producer waits for memory, without blocking the loop.
"""

import asyncio
import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import numpy as np

import asyncmem

SHAPE, BATCHES, ROOM = (2048, 256), 24, 4
SIZE = SHAPE[0] * SHAPE[1] * 4

Floats = np.ndarray[Any, np.dtype[np.float32]]


class Library(NamedTuple):
    """An array library, and how it works on a stream of another library."""

    name: str
    device: str
    on: Callable[[asyncmem.devices.Stream], AbstractContextManager[object]]
    from_dlpack: Callable[[asyncmem.Array], Any]


def find() -> Library:
    """Return the first library that can be used here."""
    for find_one in (_torch, _cupy):
        try:
            return find_one()
        except (ImportError, RuntimeError):
            continue  # not installed, or no GPU for it
    return Library("numpy", "host", lambda _: nullcontext(), np.from_dlpack)


def _torch() -> Library:
    torch: Any = importlib.import_module("torch")
    if not torch.cuda.is_available():
        raise RuntimeError("torch finds no GPU")
    return Library(
        "torch", "cuda:0", lambda s: torch.cuda.stream(torch.cuda.ExternalStream(s.handle)), torch.from_dlpack
    )


def _cupy() -> Library:
    cupy: Any = importlib.import_module("cupy")
    cupy.cuda.runtime.getDeviceCount()
    return Library("cupy", "cuda:0", lambda s: cupy.cuda.ExternalStream(s.handle), cupy.from_dlpack)


def read(number: int) -> Floats:
    """Return a batch as it comes from a disk or a network."""
    return np.random.default_rng(number).normal(number, 1, SHAPE).astype(np.float32)


async def produce(
    pool: asyncmem.AsyncMemoryPool,
    queue: asyncio.Queue[asyncmem.Buffer | None],
    mine: asyncmem.devices.Stream,
    theirs: asyncmem.devices.Stream,
) -> None:
    """Put every batch on the card, by way of page-locked memory."""
    async with pool.pinned.allocate_async(SIZE, stream=mine) as staging:
        here = staging.view("float32", SHAPE).numpy(np.float32)
        for number in range(BATCHES):
            here[:] = read(number)
            buffer = await pool.allocate_async(SIZE, stream=mine, tag="batch")
            await buffer.copy_from(staging)  # the next batch may overwrite it then
            buffer.hand_over(theirs)
            await queue.put(buffer)
    await queue.put(None)


async def consume(
    pool: asyncmem.AsyncMemoryPool,
    library: Library,
    queue: asyncio.Queue[asyncmem.Buffer | None],
    mine: asyncmem.devices.Stream,
) -> list[Floats]:
    """Return the sums of each batch's columns."""
    results = []
    async with pool.pinned.allocate_async(SHAPE[1] * 4, stream=mine) as staging:
        here = staging.view("float32").numpy(np.float32)
        while (buffer := await queue.get()) is not None:
            async with buffer:
                with library.on(mine):
                    sums = asyncmem.asarray(library.from_dlpack(buffer.view("float32", SHAPE)).sum(0), stream=mine)
            # The batch is free already, behind the kernel that may still read it; this waits for that kernel.
            await staging.copy_from(sums)
            sums.buffer.free()
            results.append(here.copy())
    return results


async def main() -> None:
    """Run both, and compare with plain numpy."""
    library = find()
    limit = ROOM * SIZE
    async with asyncmem.AsyncMemoryPool(library.device, limit=limit, segment_size=limit) as pool:
        queue: asyncio.Queue[asyncmem.Buffer | None] = asyncio.Queue()
        first, second = pool.device.create_stream("copies"), pool.device.create_stream("sums")
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(produce(pool, queue, first, second))
            sums = tasks.create_task(consume(pool, library, queue, second))
        stats = pool.stats()

    print(f"{BATCHES} batches of {SIZE >> 20} MiB by {library.name} on {library.device}, {stats.waits} waited")
    print(f"at most {stats.peak_reserved >> 20} MiB were reserved")
    for number, found in enumerate(sums.result()):
        assert np.allclose(found, read(number).sum(0), rtol=1e-3, atol=0.5)
    assert len(sums.result()) == BATCHES
    assert stats.peak_reserved <= limit


if __name__ == "__main__":
    asyncmem.run(main)
