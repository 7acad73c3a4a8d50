"""A data pipeline that slows down instead of running out of memory.

Images are read, turned into floating point, and summed up, each stage on a stream of its own, so that all three work
at once. No queue has a size to tune: what the stages may hold together is the pool's limit, and the pipeline leaves
each of them room for the next image. Reading is far faster than the rest, and simply waits for memory.

It runs on the host; ``main("cuda:0", OnGpu(cupy))`` does the same on a GPU, with a stream of it for each stage.
"""

from collections.abc import Callable
from types import ModuleType
from typing import Any, cast

import numpy as np

import asyncmem
from asyncmem.devices import HostStream, Stream
from asyncmem.pipeline import Pipeline, StageShare, stage

IMAGES = 100
SHAPE = (256, 256, 3)  # bytes; as float32 four times as many
PIXELS = 256 * 256 * 3
LIMIT = "4 MiB"

Pixels = np.ndarray[Any, np.dtype[np.uint8]]
Floats = np.ndarray[Any, np.dtype[np.float32]]


class OnHost:
    """Where a stage works: a stream of the host is a thread that runs functions in order."""

    library: ModuleType = np

    def run(self, stream: Stream | None, work: Callable[..., object], *arrays: object) -> None:
        """Queue work on arrays behind all that the stream has to do."""
        cast("HostStream", stream).run(work, *arrays)

    async def answer(self, stream: Stream | None, work: Callable[..., Any], *arrays: object) -> float:
        """Queue it and wait for the number that it returns."""
        return float(await cast("HostStream", stream).run(work, *arrays))


class OnGpu(OnHost):
    """The same by CuPy."""

    def __init__(self, cupy: ModuleType) -> None:
        self.library = cupy

    def run(self, stream: Stream | None, work: Callable[..., object], *arrays: object) -> None:
        """Queue work on arrays behind all that the stream has to do."""
        with self.library.cuda.ExternalStream(cast("Any", stream).handle):
            work(*arrays)

    async def answer(self, stream: Stream | None, work: Callable[..., Any], *arrays: object) -> float:
        """Queue it and wait for the number that it returns."""
        with self.library.cuda.ExternalStream(cast("Any", stream).handle):
            found = work(*arrays)
        await cast("Stream", stream).synchronize()
        return float(found)


class Steps:
    """What is done with an image, by numpy or by a library like it."""

    def __init__(self, library: ModuleType) -> None:
        self.library = library

    def load(self, number: int, image: Pixels) -> None:
        """Stand in for reading and decoding a file."""
        image.reshape(-1)[:] = self.library.arange(PIXELS) * (number + 1) % 251

    def scale(self, image: Pixels, scaled: Floats) -> None:
        """Make channels first, and every channel's mean 0 and variance 1."""
        scaled[:] = image.transpose(2, 0, 1)
        scaled -= scaled.mean(axis=(1, 2), keepdims=True)
        scaled /= scaled.std(axis=(1, 2), keepdims=True)

    def features(self, scaled: Floats) -> Floats:
        """Stand in for a model."""
        summed: Floats = self.library.abs(scaled).sum(dtype=self.library.float64)
        return summed

    def one_by_one(self) -> list[float]:
        """Compute the same without a pipeline, one image after the other."""
        image, scaled = self.library.empty(SHAPE, "uint8"), self.library.empty((3, 256, 256), "float32")
        results = []
        for number in range(IMAGES):
            self.load(number, image)
            self.scale(image, scaled)
            results.append(float(self.features(scaled)))
        return results


def stages(place: OnHost, steps: Steps) -> list[Any]:
    """Make the three stages, each on a stream of its own."""
    array = steps.library.asarray

    @stage(credit=PIXELS, stream="read")
    async def read(number: int, pool: StageShare) -> asyncmem.Array:
        """Queue the reading of an image, and pass on the memory that it will be in."""
        image = await pool.empty(SHAPE, "uint8", tag="image")
        place.run(pool.stream, steps.load, number, array(image))
        return image

    @stage(credit=4 * PIXELS, stream="normalise")
    async def normalise(image: asyncmem.Array, pool: StageShare) -> asyncmem.Array:
        """Queue the next step: its stream waits for the reading, and nothing waits here."""
        scaled = await pool.empty((3, 256, 256), "float32", tag="scaled")
        place.run(pool.stream, steps.scale, array(image), array(scaled))
        return scaled

    @stage(credit=0, stream="model")
    async def model(scaled: asyncmem.Array, pool: StageShare) -> float:
        """Wait for the result. The memory goes back when the last work on it is done."""
        return await place.answer(pool.stream, steps.features, array(scaled))

    return [read, normalise, model]


async def main(device: str = "host", place: OnHost | None = None) -> None:
    """Run the images through one small pool, and compare with the same without one."""
    place = place or OnHost()
    steps = Steps(place.library)
    async with asyncmem.AsyncMemoryPool(device, limit=LIMIT, segment_size=LIMIT) as pool:
        pipe: Pipeline[int, float] = Pipeline(*stages(place, steps), pool=pool)
        async with pipe:
            results = [result async for result in pipe.map(range(IMAGES), in_flight=16)]
        stats = pool.stats()

    print(pipe.report())
    assert results == steps.one_by_one()
    assert stats.waits > 0
    assert stats.peak_reserved <= 4 << 20
    print(
        f"all {IMAGES} results are those without a pipeline, in order; the stages waited {stats.waits} times for memory"
    )


if __name__ == "__main__":
    asyncmem.run(main)
