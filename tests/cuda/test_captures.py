"""Captures of other libraries' streams: the pool names them, works beside them, and ends none."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

import pytest

from asyncmem import AsyncMemoryPool, DeviceError, InvalidRequest
from asyncmem.devices import Cuda, Stream
from asyncmem.pool.open_pool import OpenPool

from .fake import FakeDriver

MIB = 1 << 20
LIMIT = 4 * MIB


class Theirs:
    """What another library offers of its stream; each asking makes a new object, as torch's current stream does."""

    def __init__(self, handle: int) -> None:
        self.cuda_stream = handle
        self.device_index = 0


def kept(handle: int) -> Theirs:
    return Theirs(handle)


Name = Callable[[int], Any]
NAMES = [pytest.param(int, id="number"), pytest.param(kept, id="object")]


@pytest.fixture
def stream(cuda: Cuda) -> Iterator[int]:
    """A stream that was made past asyncmem, and that it has not been shown."""
    from cuda.bindings import driver

    with cuda.context.entered():
        code, handle = driver.cuStreamCreate(1)
    assert code == 0
    yield int(handle)
    with cuda.context.entered():
        assert driver.cuStreamDestroy(handle)[0] == 0


@pytest.fixture
def pool(request: pytest.FixtureRequest, cuda: Cuda) -> Iterator[AsyncMemoryPool]:
    """A pool that the stream outlives."""
    request.getfixturevalue("stream")
    with AsyncMemoryPool(cuda, limit=LIMIT, segment_size=LIMIT, min_free=0) as pool:
        yield pool
        pool.check()
    request.node.funcargs.clear()  # which would keep the pool, and with it streams, until the last look at what is left


@contextmanager
def capturing(stream: int) -> Iterator[None]:
    """Capture on a stream, in the mode that forbids most; it must have gone on to the end."""
    from cuda.bindings import driver

    assert driver.cuStreamBeginCapture(stream, driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL)[0] == 0
    try:
        yield
    finally:
        code, graph = driver.cuStreamEndCapture(stream)
    assert code == 0, code.name
    driver.cuGraphDestroy(graph)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("known", [False, True], ids=["new", "known before"])
def test_a_captured_stream_may_be_named(pool: AsyncMemoryPool, stream: int, name: Name, known: bool) -> None:
    """Inside of a block it gets memory, each time as the same stream, whether it was known before or not."""
    if known:
        pool.allocate(MIB, stream=name(stream)).free()
    with pool.graph() as memory, capturing(stream):
        first = pool.allocate(MIB, stream=name(stream))
        address = first.address
        first.free()
        again = pool.allocate(MIB, stream=name(stream))
        assert again.address == address
    again.free()
    memory.release()
    pool.allocate(LIMIT, stream=name(stream), timeout=60).free()


@pytest.mark.parametrize("name", NAMES)
def test_a_graph_of_one_stream_knows_it_by_its_name(pool: AsyncMemoryPool, stream: int, name: Name) -> None:
    """Also where the block was opened before the capture, when the same stream had a number."""
    with pool.graph(name(stream)) as memory, capturing(stream):
        pool.allocate(MIB, stream=name(stream)).free()
    assert memory.nbytes == MIB
    memory.release()


@pytest.mark.parametrize("name", NAMES)
def test_outside_of_a_block_it_is_refused_and_goes_on(pool: AsyncMemoryPool, stream: int, name: Name) -> None:
    with capturing(stream), pytest.raises(InvalidRequest, match="not being captured"):
        pool.allocate(MIB, stream=name(stream))


def test_two_captures_of_one_handle_are_two_streams(pool: AsyncMemoryPool, stream: int) -> None:
    """What a bare handle meant in a capture that has ended says nothing of the next one."""
    seen = set()
    for _ in range(2):
        with pool.graph() as memory, capturing(stream):
            buffer = pool.allocate(MIB, stream=stream)
            seen.add(buffer.stream)
            buffer.free()
        memory.release()
    assert len(seen) == 2


def test_a_fence_behind_all_streams_that_is_being_recorded_ends_no_capture(cuda: Cuda, stream: int) -> None:
    """It is done before `begin_captures` returns, and refused after that, however threads meet."""
    over, recorded = threading.Event(), [0, 0]

    def record(thread: int) -> None:
        while not over.is_set():
            with suppress(DeviceError):
                cuda.record_all()
                recorded[thread] += 1

    with ThreadPoolExecutor(2) as threads:
        recorders = [threads.submit(record, number) for number in range(2)]
        try:
            for _ in range(1000):
                cuda.begin_captures()
                with capturing(stream):
                    pass
                cuda.end_captures()
            while not all(recorded):
                pass
        finally:
            over.set()
    assert all(one.exception() is None for one in recorders)


@pytest.mark.parametrize("when", ["in it", "before"])
def test_readers_that_name_no_stream_end_no_capture(pool: AsyncMemoryPool, stream: int, when: str) -> None:
    """A fence behind all streams would; so it is recorded after the block, and the memory waits for that."""
    read = [pool.allocate(LIMIT)]
    assert read[0].__cuda_array_interface__["data"][0]
    if when == "before":
        read.clear()
        with capturing(stream):
            with pool.graph():
                pass
            pool._opened.retire.poll()  # as the worker does, which makes up for fences that were refused
    else:
        with pool.graph(), capturing(stream):
            read.clear()
            assert pool.try_allocate(MIB, stream=pool.device.create_stream()) is None
    pool.allocate(LIMIT, stream=pool.device.create_stream(), timeout=60).free()


@pytest.mark.asyncio
@pytest.mark.parametrize("segments", ["stream_ordered", "paged"])
async def test_who_waits_for_such_memory_gets_it_when_the_block_ends(cuda: Cuda, stream: int, segments: str) -> None:
    """Nobody else has to free anything for that, and meanwhile the worker does not try again and again."""
    async with AsyncMemoryPool(cuda, limit=LIMIT, segment_size=LIMIT, min_free=0, segments=segments) as pool:
        read = [await pool.allocate_async(LIMIT)]
        assert read[0].__cuda_array_interface__["data"][0]
        with pool.graph(), capturing(stream):
            read.clear()
            request = pool.allocate_async(LIMIT, stream=cuda.create_stream(), timeout=60)
            await asyncio.sleep(0.05)
            assert not request.done()
            assert sum(pool.stats().remedies.values()) < 20
        (await request).free()


@pytest.mark.asyncio
@pytest.mark.fake_only
async def test_a_request_whose_stream_is_captured_meanwhile_waits_on(cuda: Cuda, fake: FakeDriver, stream: int) -> None:
    """To be ordered behind another stream's work would end the capture."""
    theirs, other = Theirs(stream), cuda.create_stream()
    async with AsyncMemoryPool(cuda, limit=LIMIT, segment_size=LIMIT, min_free=0) as pool:
        held = await pool.allocate_async(LIMIT, stream=other)
        fake.hold(other.handle)
        fake.launch(other.handle, writes=[(held.address, held.nbytes)])
        request = pool.allocate_async(MIB, stream=theirs, timeout=60)
        with cuda.context.entered(), capturing(stream):
            held.free()
            await asyncio.sleep(0.01)
            assert not request.done()
        fake.release()
        (await request).free()


def begin_growth(pool: AsyncMemoryPool, fake: FakeDriver, stream: Stream) -> None:
    """Have the worker get memory for a stream; it is at it when this returns, and nobody wants the memory any more."""
    before = fake.calls("cuMemAllocFromPoolAsync")
    pool.allocate_async(MIB, stream=stream).cancel()
    while fake.calls("cuMemAllocFromPoolAsync") == before:
        time.sleep(0.001)


@pytest.mark.asyncio
@pytest.mark.fake_only
@pytest.mark.parametrize("begins", ["in it", "before"])
async def test_memory_that_grows_around_the_start_of_a_block_serves_it(
    cuda: Cuda, fake: FakeDriver, begins: str
) -> None:
    """What has come for a stream that is captured next needs no fence that could not be recorded there any more."""
    captured = cuda.create_stream()
    fake.latency("cuMemAllocFromPoolAsync", 50_000_000)
    async with AsyncMemoryPool(cuda, limit=LIMIT, segment_size=LIMIT, min_free=0, segments="stream_ordered") as pool:
        if begins == "before":
            begin_growth(pool, fake, captured)
        with pool.graph() as memory:
            if begins == "in it":
                begin_growth(pool, fake, captured)
            await asyncio.to_thread(pool._opened.run(lambda: None).block, 60)  # the worker is past it
            with cuda.context.entered(), capturing(captured.handle):
                pool.allocate(MIB, stream=captured).free()
        memory.release()


@pytest.mark.fake_only
def test_segments_that_could_not_be_joined_serve_a_capture(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker has come too late for that, and they are as they were: behind a fence from before the capture."""
    monkeypatch.setattr(OpenPool, "beat", lambda _: None)  # it joins when it is told to
    captured = cuda.create_stream()
    with AsyncMemoryPool(cuda, limit=LIMIT, segment_size=LIMIT // 2, min_free=0, segments="stream_ordered") as pool:
        opened = pool._opened
        both = [pool.allocate(LIMIT // 2, stream=captured) for _ in range(2)]
        both.clear()
        with pool.graph() as memory, cuda.context.entered(), capturing(captured.handle):
            opened.core.scheduler.begin_beat()
            opened.core.carry_out()
            opened.run(lambda: None).block(60)
            pool.allocate(LIMIT // 2, stream=captured).free()
        memory.release()


@pytest.mark.asyncio
async def test_a_captured_request_that_only_has_memory_of_its_own_stream_waits(cuda: Cuda) -> None:
    """What was freed there in the block, before the capture, has a fence no sooner than after it."""
    captured = cuda.create_stream()
    async with AsyncMemoryPool(cuda, limit=LIMIT, segment_size=LIMIT, min_free=0) as pool:
        with pool.graph() as memory:
            (await pool.allocate_async(LIMIT, stream=captured)).free()
            with cuda.context.entered(), capturing(captured.handle):
                request = pool.allocate_async(LIMIT, stream=captured, timeout=60)
                await asyncio.sleep(0.01)
                assert not request.done()
            (await request).free()
        memory.release()
