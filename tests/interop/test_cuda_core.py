"""cuda.core allocates from pools, budgets and leases."""

import gc
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import pytest

from asyncmem import AsyncMemoryPool, InvalidRequest, OutOfMemoryError
from asyncmem.devices import Cuda, Simulated
from tests.cuda.fake import FakeDriver

from .conftest import MIB

core: Any = pytest.importorskip("cuda.core", reason="cuda.core is not installed")


@pytest.fixture
def streams(cuda: Cuda) -> Iterator[tuple[Any, Any]]:
    """Two of its streams. Those that it makes itself would keep the card's context."""
    ours = [cuda.create_stream("one"), cuda.create_stream("two")]
    yield tuple(core.Stream.from_handle(one.handle) for one in ours)
    gc.collect()


Streams = tuple[Any, Any]


def test_buffers_come_from_the_pool_and_go_back(pool: AsyncMemoryPool, streams: Streams) -> None:
    """By a close, by the death of the buffer, and from any thread; they count under the tag."""
    resource = pool.as_memory_resource(tag="theirs")
    assert (resource.is_device_accessible, resource.is_host_accessible, resource.device_id) == (True, False, 0)
    buffer = resource.allocate(MIB, stream=streams[0])
    assert (buffer.size, buffer.memory_resource) == (MIB, resource)
    assert pool.stats().allocated_bytes == MIB
    assert pool._core.tag_bytes() == {"theirs": MIB}
    buffer.close()
    assert pool.stats().allocated_bytes == 0
    buffer = resource.allocate(MIB, stream=streams[0])
    del buffer
    gc.collect()
    assert pool.stats().allocated_bytes == 0
    buffer = resource.allocate(MIB, stream=streams[0])
    thread = threading.Thread(target=buffer.close)
    thread.start()
    thread.join()
    assert pool.stats().allocated_bytes == 0


def test_lease_serves_from_its_range(pool: AsyncMemoryPool, streams: Streams) -> None:
    """What is too large for it raises, and a buffer that outlives it stays the pool's."""
    with pool.lease(MIB) as lease:
        resource = lease.as_memory_resource()
        buffer = resource.allocate(MIB // 2, stream=streams[0])
        assert int(buffer.handle) == lease.address
        with pytest.raises(OutOfMemoryError):
            resource.allocate(MIB, stream=streams[0])
    assert pool.stats().allocated_bytes == MIB // 2
    buffer.close()
    assert pool.stats().allocated_bytes == 0


def test_empty_buffers_are_fine(pool: AsyncMemoryPool, streams: Streams) -> None:
    """Any number of them, at one address."""
    resource = pool.as_memory_resource()
    buffers = [resource.allocate(0, stream=streams[0]) for _ in range(2)]
    for one in buffers:
        assert one.size == 0
        one.close()


@pytest.mark.fake_only
def test_few_streams_are_kept_and_known(cuda: Cuda, driver: FakeDriver) -> None:
    """The driver is asked once who a stream is, also if the program closes it; of many streams the pool keeps none."""
    context = cuda.context
    first, *others = [context.create_stream() for _ in range(80)]
    with AsyncMemoryPool(cuda, limit=64 * MIB, min_free=0) as pool:
        for resource in (pool.as_memory_resource(), pool.as_memory_resource()):
            theirs = core.Stream.from_handle(first)
            resource.allocate(MIB, stream=theirs).close()
            before = driver.calls("cuStreamGetId")
            for _ in range(3):
                resource.allocate(MIB, stream=theirs).close(theirs)
            theirs.close()
            theirs = core.Stream.from_handle(first)
            resource.allocate(MIB, stream=theirs).close()
            assert driver.calls("cuStreamGetId") == before
        for handle in others:
            resource.allocate(MIB, stream=core.Stream.from_handle(handle)).close()
        known = pool._core.stream_objects[1:]
        assert [one.lasting for one in known] == [True] * 63 + [False] * 17
        assert pool.stats().allocated_bytes == 0
        del known, resource
    for handle in (first, *others):
        context.destroy_stream(handle)


@pytest.mark.fake_only
@pytest.mark.parametrize("known", [True, False])
def test_stream_that_is_captured_gets_memory_of_a_graph(cuda: Cuda, known: bool) -> None:
    """Else it is refused, also if the pool keeps it already; a stream that is new then is not kept."""
    from cuda.bindings import driver as calls

    handle = cuda.context.create_stream()
    with AsyncMemoryPool(cuda, limit=64 * MIB, min_free=0) as pool:
        resource, theirs = pool.as_memory_resource(), core.Stream.from_handle(handle)
        if known:
            resource.allocate(MIB, stream=theirs).close()
        with pool.graph() as memory:
            assert calls.cuStreamBeginCapture(handle, calls.CUstreamCaptureMode(1))[0] == 0
            buffer = resource.allocate(MIB, stream=theirs)
            buffer.close()
            code, graph = calls.cuStreamEndCapture(handle)
            assert code == 0
        assert calls.cuStreamBeginCapture(handle, calls.CUstreamCaptureMode(1))[0] == 0
        with pytest.raises(InvalidRequest, match="being captured"):
            resource.allocate(MIB, stream=theirs)
        assert calls.cuGraphDestroy(calls.cuStreamEndCapture(handle)[1])[0] == 0
        assert calls.cuGraphDestroy(graph)[0] == 0
        memory.release()
        resource.allocate(MIB, stream=theirs).close()
        assert pool.stats().allocated_bytes == 0
        del buffer, memory
    cuda.context.destroy_stream(handle)


@pytest.mark.fake_only
def test_memory_goes_back_behind_the_stream_of_the_close(
    pool: AsyncMemoryPool, cuda: Cuda, streams: Streams, driver: FakeDriver
) -> None:
    """Whoever gets it next comes behind the work of that stream, as of the one that it was made for."""
    resource = pool.as_memory_resource()
    other = cuda.create_stream("other")
    first, _ = streams
    for last in streams:
        buffer = resource.allocate(60 * MIB, stream=first)
        written = (int(buffer.handle), 60 * MIB)
        driver.launch(int(first.handle), writes=[written])
        cuda.stream_of(last).wait(cuda.stream_of(first).record())
        driver.hold(int(last.handle))
        driver.launch(int(last.handle), writes=[written])
        buffer.close(last)
        with pool.allocate(60 * MIB, stream=other) as again:
            driver.launch(other.handle, writes=[(again.address, 60 * MIB)])
            driver.release()
    assert driver.violations() == []


def test_resource_goes_with_its_last_reference(pool: AsyncMemoryPool, streams: Streams) -> None:
    """Nothing in it waits for the garbage collector, which would keep its streams alive meanwhile."""
    resource = pool.as_memory_resource()
    resource.allocate(MIB, stream=streams[0]).close()
    gone = weakref.ref(resource)
    gc.disable()
    try:
        del resource
        assert gone() is None
    finally:
        gc.enable()


def test_memory_of_another_kind_is_refused() -> None:
    """cuda.core's resources are CUDA's memory."""
    with AsyncMemoryPool(Simulated(), limit=MIB) as pool, pytest.raises(InvalidRequest, match="CUDA device"):
        pool.as_memory_resource()
