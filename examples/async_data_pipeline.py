"""A data pipeline that slows down instead of running out of memory.

Images are read, turned into floating point, and summed up, each stage on a stream of its own, so that all three work
at once. No queue has a size to tune: what the stages may hold together is the pool's limit, and the pipeline leaves
each of them room for the next image. Reading is far faster than the rest, and simply waits for memory.
"""

from typing import Any, cast

import numpy as np

import asyncmem
from asyncmem.devices import HostStream
from asyncmem.pipeline import Pipeline, StageShare, stage

IMAGES = 100
SHAPE = (256, 256, 3)  # bytes; as float32 four times as many
PIXELS = 256 * 256 * 3
LIMIT = "4 MiB"

Pixels = np.ndarray[Any, np.dtype[np.uint8]]
Floats = np.ndarray[Any, np.dtype[np.float32]]


def load(number: int, image: Pixels) -> None:
    """Stand in for reading and decoding a file."""
    image.reshape(-1)[:] = np.arange(PIXELS) * (number + 1) % 251


def scale(image: Pixels, scaled: Floats) -> None:
    """Make channels first, and every channel's mean 0 and variance 1."""
    scaled[:] = image.transpose(2, 0, 1)
    scaled -= scaled.mean(axis=(1, 2), keepdims=True)
    scaled /= scaled.std(axis=(1, 2), keepdims=True)


def features(scaled: Floats) -> float:
    """Stand in for a model."""
    return float(np.abs(scaled).sum(dtype=np.float64))


def worker(pool: StageShare) -> HostStream:
    """Answer the stream of a stage: on the host, a thread that runs functions in order."""
    return cast("HostStream", pool.stream)


@stage(credit=PIXELS, stream="read")
async def read(number: int, pool: StageShare) -> asyncmem.Array:
    """Queue the reading of an image, and pass on the memory that it will be in."""
    image = await pool.empty(SHAPE, "uint8", tag="image")
    worker(pool).run(load, number, np.asarray(image))
    return image


@stage(credit=4 * PIXELS, stream="normalise")
async def normalise(image: asyncmem.Array, pool: StageShare) -> asyncmem.Array:
    """Queue the next step: its stream waits for the reading, and nobody waits here."""
    scaled = await pool.empty((3, 256, 256), "float32", tag="scaled")
    worker(pool).run(scale, np.asarray(image), np.asarray(scaled))
    return scaled


@stage(credit=0, stream="model")
async def model(scaled: asyncmem.Array, pool: StageShare) -> float:
    """Wait for the result. The memory goes back when the last work on it is done."""
    return cast("float", await worker(pool).run(features, np.asarray(scaled)))


def one_by_one() -> list[float]:
    """Compute the same by plain numpy, one image after the other."""
    image, scaled = np.empty(SHAPE, np.uint8), np.empty((3, 256, 256), np.float32)
    results = []
    for number in range(IMAGES):
        load(number, image)
        scale(image, scaled)
        results.append(features(scaled))
    return results


async def main() -> None:
    """Run the images through one small pool, and compare with plain numpy."""
    async with asyncmem.AsyncMemoryPool("host", limit=LIMIT, segment_size=LIMIT) as pool:
        async with Pipeline(read, normalise, model, pool=pool) as pipe:
            results = [result async for result in pipe.map(range(IMAGES), in_flight=16)]
        stats = pool.stats()

    print(pipe.report())
    assert results == one_by_one()
    assert stats.waits > 0
    assert stats.peak_reserved <= 4 << 20
    print(f"all {IMAGES} results are those of plain numpy, in order; the stages waited {stats.waits} times for memory")


if __name__ == "__main__":
    asyncmem.run(main)
