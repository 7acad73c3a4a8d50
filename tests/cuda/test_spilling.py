"""Marked memory of a GPU: it moves to page-locked memory and back in the order of the driver's streams."""

from __future__ import annotations

import asyncio
import gc
import warnings
from collections import Counter

import pytest

from asyncmem import AsyncmemError, AsyncMemoryPool, DeviceError, InvalidRequest, OutOfMemoryError, Spillable
from asyncmem.devices import Cuda
from tests.conservation import whole
from tests.pool.spill_program import Program

from .fake import FakeDriver

MIB = 1 << 20
LIMIT = 4 * MIB


def make_pool(cuda: Cuda, **options: object) -> AsyncMemoryPool:
    """A pool that a few megabytes fill."""
    settings: dict[str, object] = {"limit": LIMIT, "segment_size": LIMIT, "min_free": 0, "stall_after": None}
    settings |= {"spill_limit": 4 * LIMIT, **options}
    return AsyncMemoryPool(cuda, **settings)  # type: ignore[arg-type]  # what tests pass


@pytest.mark.parametrize("seed", range(3))
def test_every_read_sees_what_was_written_there(cuda: Cuda, seed: int) -> None:
    """Random programs on three streams, over three times the limit."""

    async def main() -> None:
        async with make_pool(cuda, small_limit=512) as pool:
            streams = [cuda.create_stream() for _ in range(3)]
            await Program(pool, list(streams), seed).run()

    asyncio.run(main())


def test_a_reader_of_the_array_interface_keeps_it_in_place(cuda: Cuda) -> None:
    """Such a library keeps the buffer for as long as it may use the address; that is seen though the block is over."""
    with make_pool(cuda) as pool:
        marked = pool.spillable(pool.allocate(LIMIT))
        with marked as buffer:
            reader = (buffer.__cuda_array_interface__, buffer)
            del buffer
        with pytest.raises(OutOfMemoryError):
            pool.allocate(MIB)
        with marked:
            pass
        with pytest.raises(OutOfMemoryError):
            pool.allocate(MIB)
        assert not marked.spilled
        del reader
        gc.collect()
        pool.allocate(MIB).free()
        assert marked.spilled
        marked.free()
        whole(pool)


def test_streams_known_by_a_mere_number_keep_it_in_place(cuda: Cuda) -> None:
    """Nobody knows whether such a stream still is there when the memory moves; as a home it is refused at the call."""
    handle = cuda.context.create_stream()
    with make_pool(cuda) as pool:
        buffer = pool.allocate(LIMIT, stream=handle)
        with pytest.raises(InvalidRequest, match="kept alive"):
            pool.spillable(buffer)
        buffer.hand_over(None)
        marked = pool.spillable(buffer)
        with marked.use(handle):
            pass
        with pytest.raises(OutOfMemoryError):
            pool.allocate(MIB)
        marked.free()
        whole(pool)
    cuda.context.destroy_stream(handle)


def test_moving_waits_for_nothing(fake: FakeDriver, cuda: Cuda) -> None:
    """The request has its memory while the work before the copy has not even begun."""
    stream, taker = cuda.create_stream(), cuda.create_stream()
    with make_pool(cuda) as pool:
        marked = pool.spillable(pool.allocate(LIMIT, stream=stream))
        with marked as buffer:
            cuda.fill(buffer.address, buffer.nbytes, 5, stream)
        fake.hold(stream.handle)
        taken = pool.allocate(LIMIT, stream=taker)
        assert marked.spilled
        cuda.fill(taken.address, taken.nbytes, 6, taker)
        taken.free()
        with marked as buffer:
            back = bytearray(1)
            fake.release(stream.handle)
            cuda.copy_out(memoryview(back), buffer.address, stream)
            stream.synchronize_blocking()
            assert back[0] == 5
        marked.free()
        whole(pool)


class Workload:
    """Three halves that take turns over two, read by value; its errors are counted."""

    def __init__(self, cuda: Cuda) -> None:
        self.cuda = cuda
        self.stream = cuda.create_stream()
        self.pool = make_pool(cuda)
        self.marked: list[Spillable] = []
        for number in range(3):
            buffer = self.pool.allocate(LIMIT // 2, stream=self.stream)
            cuda.fill(buffer.address, buffer.nbytes, number, self.stream)
            self.marked.append(self.pool.spillable(buffer))

    def run(self) -> int:
        """Use each twice; what can be read is what was written there. Returns how many uses failed."""
        errors = 0
        for number, one in list(enumerate(self.marked)) * 2:
            try:
                with one.use(timeout=10) as buffer:
                    back = bytearray(buffer.nbytes // 16)
                    self.cuda.copy_out(memoryview(back), buffer.address + buffer.nbytes // 2, self.stream)
                    self.stream.synchronize_blocking()
            except AsyncmemError:
                errors += 1
            else:
                assert back.count(number) == len(back)
        return errors

    def end(self) -> None:
        """Free all; nothing is left on either side."""
        for one in self.marked:
            one.free()
        whole(self.pool)
        whole(self.pool._host_pool("spilled"))
        self.pool.close()


@pytest.mark.fake_only
@pytest.mark.parametrize("code", [2, 999])
def test_whichever_call_fails_no_bytes_are_lost(fake: FakeDriver, cuda: Cuda, code: int) -> None:
    """A use fails by name or has its bytes; once the driver works again, all have them."""
    workload = Workload(cuda)
    before = Counter(fake.counts())
    assert workload.run() == 0
    calls = Counter(fake.counts()) - before
    workload.end()
    assert calls["cuMemcpyHtoDAsync"] >= 3
    for name, count in sorted(calls.items()):
        for nth in sorted({1, count // 2, count} - {0}):
            workload = Workload(cuda)
            fake.fail(name, nth, code)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", RuntimeWarning)  # a fault that met nobody who waits is a warning
                workload.run()
            fake.clear_faults()
            assert workload.run() == 0, name
            workload.end()


@pytest.mark.fake_only
def test_a_lost_device_is_named_and_holds_up_nobody(fake: FakeDriver, cuda: Cuda) -> None:
    """What was away is lost by name, and can still be freed."""
    workload = Workload(cuda)
    assert sum(one.spilled for one in workload.marked) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # what the worker meets and nobody waits for
        fake.lose()
        with pytest.raises(DeviceError, match="CUDA_ERROR_ILLEGAL_ADDRESS"), workload.marked[0]:
            pass
        for one in workload.marked:
            one.free()
            assert not one.alive
        stats = workload.pool.stats()
        assert (stats.spilled_bytes, stats.allocated_bytes) == (0, 0)
        with pytest.raises(DeviceError, match="CUDA_ERROR_ILLEGAL_ADDRESS"):
            workload.pool.close()
    fake.devices(1)  # as no real device does, it comes back, and what was out can be given back
    cuda.record_all().block()
    workload.pool.close()
    workload.pool._host_pools["spilled"].close(5)
