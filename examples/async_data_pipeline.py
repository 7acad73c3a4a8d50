"""A data pipeline that slows down instead of running out of memory.

A producer loads batches far faster than the consumer uses them. No queue size is tuned: the queue between them is
unbounded, and the pool's limit is what holds the producer back. It waits in `pool.empty` until a batch has been used.
"""

import asyncio
from typing import Any

import numpy as np

import asyncmem
from asyncmem.devices import HostStream

BATCHES = 100
SHAPE = (256, 1024)  # float32, so that a batch is 1 MiB
LIMIT = "8 MiB"

Floats = np.ndarray[Any, np.dtype[np.float32]]
Batches = asyncio.Queue[asyncmem.Array | None]


def load(number: int, batch: Floats) -> None:
    """Stand in for reading and decoding a batch."""
    batch[:] = number


def use(batch: Floats) -> float:
    """Stand in for a training step."""
    return float(np.sqrt(batch).sum(dtype=np.float64))


async def produce(pool: asyncmem.AsyncMemoryPool, stream: HostStream, queue: Batches) -> None:
    """Load all batches, as fast as memory is there for them."""
    for number in range(BATCHES):
        batch = await pool.empty(SHAPE, "float32", stream=stream, tag="batch")
        stream.run(load, number, np.asarray(batch))
        queue.put_nowait(batch)
    queue.put_nowait(None)


async def consume(stream: HostStream, queue: Batches) -> float:
    """Use them one by one, and answer what came of it."""
    total = 0.0
    while (batch := await queue.get()) is not None:
        batch.buffer.use_on(stream)  # the consumer's work waits for the producer's, on the device and not here
        total += await stream.run(use, np.asarray(batch))
    return total  # each batch was freed when the name `batch` moved on


async def main() -> None:
    """Run both over one small pool, and compare with plain numpy."""
    host = asyncmem.Host()
    loading, training = host.create_stream("loading"), host.create_stream("training")
    async with asyncmem.AsyncMemoryPool(host, limit=LIMIT) as pool:
        queue: Batches = asyncio.Queue()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(produce(pool, loading, queue))
            total = tasks.create_task(consume(training, queue))
        stats = pool.stats()

    expected = sum(use(np.full(SHAPE, number, np.float32)) for number in range(BATCHES))
    print(f"{BATCHES} batches of 1 MiB went through {LIMIT}: {stats.waits} times the producer had to wait")
    print(f"peak {stats.peak_reserved / 2**20:.0f} MiB, result {total.result():.1f}, by plain numpy {expected:.1f}")
    assert total.result() == expected
    assert stats.waits > 0
    assert stats.peak_reserved <= 8 << 20


if __name__ == "__main__":
    asyncmem.run(main)
