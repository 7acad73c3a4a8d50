"""Feeds over a GPU's driver: page-locked staging, copies beside the work, and no use of memory without order."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from asyncmem import Array, AsyncMemoryPool
from asyncmem.devices import Stream
from asyncmem.devices.gpu.device import Gpu
from asyncmem.pipeline import DoubleBuffer, Prefetcher

from .fake import FakeDriver

pytestmark = pytest.mark.every_vendor

MIB = 1 << 20
WORDS = MIB // 4  # more than the driver copies at once from memory that is not page-locked


@pytest.fixture
def pool(request: pytest.FixtureRequest, gpu: Gpu) -> Iterator[AsyncMemoryPool]:
    """A pool that is whole at the end."""
    with AsyncMemoryPool(gpu, limit=32 * MIB, segment_size=8 * MIB, min_free=0) as pool:
        yield pool
        pool.check()
    request.node.funcargs.clear()  # a pool knows its streams, and would be kept until the last look at what is left


def batches(count: int) -> Iterator[tuple[np.ndarray, list[np.ndarray]]]:
    for number in range(count):
        yield np.full(WORDS, number, np.float32), [np.full(10, number, np.int64)]


def values(array: Array, stream: Stream) -> set[float]:
    """Read an array by way of a stream that has it."""
    found = np.empty(array.shape, array.dtype)  # type: ignore[arg-type]  # no test has short floats
    array.copy_to(found, stream=stream).block()
    return set(found.tolist())


@pytest.mark.parametrize("pinned", [True, False])
def test_batches_come_out_behind_their_copies(gpu: Gpu, pool: AsyncMemoryPool, pinned: bool) -> None:
    """Through page-locked memory, and by the driver's own detour."""
    stream = gpu.create_stream("work")
    with Prefetcher(pool, ahead=3, stream=stream, pinned=pinned).wrap(batches(12)) as found:
        for number, (large, (small,)) in enumerate(found):
            assert values(large, stream) == values(small, stream) == {number}
    assert (pool.pinned.stats().num_allocations > 0) is pinned


@pytest.mark.fake_only
def test_batches_are_copied_while_the_stream_works(gpu: Gpu, pool: AsyncMemoryPool, fake: FakeDriver) -> None:
    """Later batches are on the device though the stream has not done its work on the first; their memory is not its."""
    stream = gpu.create_stream("work")
    found = iter(Prefetcher(pool, ahead=3, stream=stream).wrap(batches(4)))
    held = [next(found)]
    fake.hold(stream.handle)
    fake.launch(stream.handle, reads=[(held[0][0].address, MIB)])
    held += [next(found) for _ in range(3)]
    for large, _ in held[1:]:
        large.buffer.stream.synchronize_blocking()
    fake.release(stream.handle)
    assert [values(large, stream) for large, _ in held] == [{0.0}, {1.0}, {2.0}, {3.0}]
    assert next(found, None) is None


@pytest.mark.parametrize("pinned", [True, False])
def test_turns_come_behind_their_copies(gpu: Gpu, pool: AsyncMemoryPool, pinned: bool) -> None:
    """And are filled again behind the work on them."""
    stream = gpu.create_stream("work")
    with DoubleBuffer(pool, WORDS, buffers=3, stream=stream, pinned=pinned) as feed:
        for number in range(8):
            feed.prefetch_next(np.full(WORDS, number, np.float32))
            if number:
                assert values(feed.swap(), stream) == {number - 1}


@pytest.mark.fake_only
def test_turn_is_filled_behind_the_work_that_was_given_before_it(
    gpu: Gpu, pool: AsyncMemoryPool, fake: FakeDriver
) -> None:
    """The host waits for neither; the fake would see a copy into memory that is being read."""
    stream = gpu.create_stream("work")
    with DoubleBuffer(pool, WORDS, stream=stream) as feed:
        feed.prefetch_next(np.zeros(WORDS, np.float32))
        fake.hold(stream.handle)
        for number in range(1, 6):
            current = feed.swap()
            fake.launch(stream.handle, reads=[(current.address, MIB)])
            feed.prefetch_next(np.full(WORDS, number, np.float32))
        fake.release(stream.handle)
        assert values(feed.swap(), stream) == {5}
