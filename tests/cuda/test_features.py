"""Copies, pins, page-locked memory, peers and captured graphs of pools over CUDA devices."""

import asyncio
import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from cuda.bindings import driver as api  # type: ignore[import-untyped]

from asyncmem import AsyncMemoryPool, InvalidRequest
from asyncmem.devices import Cuda, GpuStream
from tests.conservation import whole

OpenPool = Callable[[], AsyncMemoryPool]

MIB = 1 << 20
KINDS = ("paged", "stream_ordered", "direct")
GLOBAL = api.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL


@pytest.fixture(params=KINDS)
def make_pool(cuda: Cuda, request: pytest.FixtureRequest) -> Iterator[OpenPool]:
    """Open a pool for each way to get memory."""
    made: list[AsyncMemoryPool] = []

    def make() -> AsyncMemoryPool:
        settings = {"segment_size": 8 * MIB, "segments": request.param, "stall_after": None}
        made.append(AsyncMemoryPool(cuda, limit=32 * MIB, **settings))
        return made[-1]

    yield make
    while made:  # nothing must be kept here: pools know their streams
        whole(made[-1])
        made.pop().close()


@pytest.mark.asyncio
async def test_bytes_go_there_and_back(make_pool: OpenPool) -> None:
    """From ordinary memory by a thread, from page-locked memory in the order of the stream, small ones at once."""
    pool = make_pool()
    side = pool.device.create_stream()
    there = np.arange(MIB, dtype=np.uint8)
    async with pool.allocate_async(MIB) as first, pool.allocate_async(MIB, stream=side) as second:
        await first.copy_from(there)
        first.copy_to_device(second)
        await second.copy_from(b"\xff\xfe", stream=side)
        async with pool.pinned.allocate_async(MIB, stream=side) as staging:
            await second.copy_to(staging)
            back = np.frombuffer(staging, np.uint8).copy()
            assert bytes(back[:2]) == b"\xff\xfe"
            np.testing.assert_array_equal(back[2:], there[2:])
            np.frombuffer(staging, np.uint8)[:] = 7
            await first.copy_from(staging)
        array = np.empty(MIB, np.uint8)
        await first.copy_to(array)
        assert set(array) == {7}


@pytest.mark.asyncio
async def test_copy_of_ordinary_memory_holds_no_loop(make_pool: OpenPool) -> None:
    """Another thread stands by while the driver reads it."""
    pool = make_pool()
    callers: list[int] = []
    real = pool.device.copy_in

    def copy_in(*arguments: object) -> None:
        callers.append(threading.get_ident())
        real(*arguments)  # type: ignore[arg-type]  # as they came

    pool.device.copy_in = copy_in  # type: ignore[method-assign]  # seen from outside
    try:
        async with pool.allocate_async(MIB) as buffer:
            await asyncio.gather(*(buffer.copy_from(bytes(MIB)) for _ in range(3)))
            await buffer.copy_from(bytes(1000))
    finally:
        del pool.device.copy_in
    assert callers[-1] == threading.get_ident()
    assert threading.get_ident() not in callers[:-1]


@pytest.mark.asyncio
async def test_copies_of_ordinary_memory_come_behind_a_threads_default_stream(make_pool: OpenPool) -> None:
    """The thread that makes them could not name that stream, whose handle means its own there."""
    pool = make_pool()
    async with pool.allocate_async(MIB, stream=2) as buffer:
        back = bytearray(MIB)
        pool.device.fill(buffer.address, MIB, 3, buffer.stream)
        await buffer.copy_to(back)
        assert set(back) == {3}
        pool.device.fill(buffer.address, MIB, 5, buffer.stream)
        await buffer.copy_from(bytes([7]) * MIB)
        await buffer.copy_to(back)
        assert set(back) == {7}


def test_pinned_address_stays(make_pool: OpenPool) -> None:
    """Neither trimming nor others get at the memory of a freed buffer that is pinned."""
    pool = make_pool()
    buffer = pool.allocate(MIB)
    pin = buffer.pin()
    buffer.free()
    pool.empty_cache()
    assert any(one.address <= pin.address < one.address + one.nbytes for one in pool.segments())
    with pool.allocate(MIB) as other:
        assert other.address != pin.address
    pin.unpin()
    pool.empty_cache()
    assert not pool.segments()


@pytest.mark.parametrize("segments", KINDS)
def test_peers_copy_and_reach_each_other(cards: tuple[Cuda, Cuda], segments: str) -> None:
    """In the order of both homes, by a stream of either."""
    first, second = cards
    with (
        AsyncMemoryPool(first, limit=16 * MIB, segments=segments, peers=[second]) as one,
        AsyncMemoryPool(second, limit=16 * MIB, segments=segments, peers=["cuda:0"]) as two,
    ):
        source, target = one.allocate(MIB), two.allocate(MIB)
        for value, stream in enumerate((None, first.create_stream(), second.create_stream()), 1):
            first.fill(source.address, MIB, value, source.stream)
            source.copy_to_device(target, stream=stream)
            back = np.zeros(MIB, np.uint8)
            assert target.copy_to(back).block(10)
            assert set(back) == {value}
        source.free()
        target.free()
        whole(one)
        whole(two)


class Capture:
    """A graph of one stream, captured on this thread in the mode that forbids most."""

    def __init__(self, device: Cuda, stream: GpuStream) -> None:
        self._device, self._handle = device, stream.handle
        with device.context.entered():
            self._need(api.cuStreamBeginCapture(self._handle, GLOBAL))

    def end(self) -> None:
        """Make it a program."""
        with self._device.context.entered():
            graph = self._need(api.cuStreamEndCapture(self._handle))
            self._program = self._need(api.cuGraphInstantiate(graph, 0))
            self._need(api.cuGraphDestroy(graph))

    def launch(self, stream: GpuStream) -> None:
        """Submit it."""
        with self._device.context.entered():
            self._need(api.cuGraphLaunch(self._program, stream.handle))

    def close(self) -> None:
        """Be done with it."""
        with self._device.context.entered():
            self._need(api.cuGraphExecDestroy(self._program))

    @staticmethod
    def _need(answer: tuple[object, ...]) -> object:
        assert answer[0] == api.CUresult.CUDA_SUCCESS, answer
        return answer[1] if len(answer) > 1 else None


def test_launched_graph_meets_nobody_in_its_memory(cuda: Cuda, make_pool: OpenPool) -> None:
    """Growth for the capture, frees in it, and others who want memory meanwhile leave it whole."""
    pool = make_pool()
    stream, other = cuda.create_stream(), cuda.create_stream()
    ordinary = pool.allocate(MIB, stream=other)
    with pool.graph(stream) as memory:
        capture = Capture(cuda, stream)
        first = pool.allocate(9 * MIB, stream=stream)
        cuda.fill(first.address, first.nbytes, 3, stream)
        with pytest.raises(InvalidRequest, match="captured"):
            ordinary.use_on(stream)
        ordinary.free(stream=other)
        address = first.address
        first.free()
        second = pool.allocate(9 * MIB, stream=stream)
        assert second.address == address
        cuda.fill(second.address, second.nbytes, 4, stream)
        capture.end()
    for _ in range(3):
        capture.launch(stream)
        with pool.allocate(MIB, stream=other, timeout=10) as buffer:
            cuda.fill(buffer.address, buffer.nbytes, 9, other)
    back = np.zeros(9 * MIB, np.uint8)
    assert second.copy_to(back, stream=stream).block(10)
    assert set(back) == {4}
    second.free()
    assert pool.stats().captured_bytes >= 9 * MIB
    capture.close()
    memory.release()
    pool.allocate(32 * MIB, stream=other, timeout=10).free()


def test_captured_stream_is_refused_outside_of_a_block(cuda: Cuda, make_pool: OpenPool) -> None:
    """The capture goes on unharmed, also when the pool is asked on the default stream meanwhile."""
    pool = make_pool()
    stream = cuda.create_stream()
    capture = Capture(cuda, stream)
    with pytest.raises(InvalidRequest, match=r"pool\.graph"):
        pool.allocate(MIB, stream=stream)
    pool.allocate(MIB).free()
    capture.end()
    capture.launch(stream)
    capture.close()
