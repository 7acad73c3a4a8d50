"""CuPy allocates from pools, budgets and leases: what of its documented interface that needs, over a stand-in for it.

Without a GPU CuPy makes no array, so here is only how it asks for memory; its arrays are in `tests/gpu`. Where CuPy is
installed, the last test holds the stand-in to what it has.
"""

import asyncio
import ctypes
import gc
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType
from typing import Any

import pytest

from asyncmem import AsyncMemoryPool, BufferReleased, InvalidRequest, OutOfMemoryError
from asyncmem.devices import Cuda
from tests.cuda.fake import FakeDriver

from .conftest import MIB

Allocate = Callable[[int], "MemoryPointer"]


class Stream:
    """`cupy.cuda.Stream`: current inside of its block."""

    def __init__(self, stream: Any) -> None:
        self.ptr, self._keeps = stream.handle, stream

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.ptr


class ExternalStream:
    """`cupy.cuda.ExternalStream`: keeps nothing."""

    def __init__(self, ptr: int) -> None:
        self.ptr = ptr


class UnownedMemory:
    """`cupy.cuda.UnownedMemory`: keeps its owner."""

    def __init__(self, ptr: int, size: int, owner: object, device_id: int) -> None:
        self.ptr, self.size, self._owner, self.device_id = ptr, size, owner, device_id


class MemoryPointer:
    """`cupy.cuda.MemoryPointer`."""

    def __init__(self, mem: UnownedMemory, offset: int) -> None:
        self.mem, self.ptr = mem, mem.ptr + offset


class Cupy(ModuleType):
    """`cupy`, as far as `asyncmem.interop.cupy` uses it: `cupy.cuda`, with the allocator of each thread."""

    Stream, ExternalStream = Stream, ExternalStream
    UnownedMemory, MemoryPointer = UnownedMemory, MemoryPointer

    def __init__(self) -> None:
        super().__init__("cupy")
        self.cuda = self.runtime = self
        self.device, self.devices = 0, 2
        self.stream: Any = ExternalStream(0)
        self._thread = threading.local()

    def getDevice(self) -> int:  # noqa: N802 -- CuPy's name
        return self.device

    def getDeviceCount(self) -> int:  # noqa: N802 -- CuPy's name
        return self.devices

    def get_current_stream(self) -> Any:
        return self.stream

    def get_allocator(self) -> Allocate:
        return getattr(self._thread, "inside", elsewhere)

    @contextmanager
    def using_allocator(self, allocator: Allocate) -> Iterator[None]:
        former, self._thread.inside = self.get_allocator(), allocator
        try:
            yield
        finally:
            self._thread.inside = former

    def alloc(self, size: int) -> MemoryPointer:
        return self.get_allocator()(size)


def elsewhere(size: int) -> MemoryPointer:
    return MemoryPointer(UnownedMemory(64, size, None, 0), 0)


_kept: list[object] = []


def in_c(call: Callable[[], int]) -> object:
    """Return a function as CuPy offers its own to others, which keep the address."""
    current = ctypes.PYFUNCTYPE(ctypes.c_ssize_t)(call)
    _kept.append(current)
    new = ctypes.pythonapi.PyCapsule_New
    new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    capsule: object = new(ctypes.cast(current, ctypes.c_void_p), b"intptr_t (void)", None)
    return capsule


@pytest.fixture
def cupy() -> Iterator[Cupy]:
    """CuPy's stand-in, for the module under test too."""
    made = Cupy()
    backend = ModuleType("cupy_backends.cuda.stream")
    backend.__pyx_capi__ = {"get_current_stream_ptr": in_c(lambda: made.stream.ptr)}  # type: ignore[attr-defined]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "cupy", made)
        patch.setitem(sys.modules, "cupy_backends.cuda.stream", backend)
        patch.delitem(sys.modules, "asyncmem.interop.cupy", raising=False)
        yield made
        patch.delitem(sys.modules, "asyncmem.interop.cupy", raising=False)


@pytest.fixture
def interop(cupy: Cupy) -> Any:
    """The module under test."""
    assert cupy
    return import_module("asyncmem.interop.cupy")


def test_memory_lies_in_the_share_of_its_block(cupy: Cupy, interop: Any, pool: AsyncMemoryPool) -> None:
    """On this thread and device alone; blocks nest, memory goes back as it dies, and what is too large raises."""
    with pool.lease(4 * MIB) as lease:
        with interop.use(lease, tag="model"):
            x = cupy.alloc(MIB)
            assert x.ptr == lease.address
            assert (x.mem.size, x.mem.device_id) == (MIB, 0)
            assert pool._core.tag_bytes() == {"model": MIB}
            with pytest.raises(OutOfMemoryError, match="from a lease of 4 MiB"):
                cupy.alloc(8 * MIB)
            assert cupy.alloc(0).mem.size == 0
            with ThreadPoolExecutor() as threads:
                assert threads.submit(cupy.alloc, 512).result().ptr == 64
            cupy.device = 1
            assert cupy.alloc(512).ptr == 64
            cupy.device = 0
            with pool.budget("some", limit=8 * MIB) as budget, interop.use(budget):
                y = cupy.alloc(8 * MIB)
                assert budget.stats().allocated_bytes == 8 * MIB
                del y
                gc.collect()
                assert budget.stats().allocated_bytes == 0
        assert cupy.alloc(512).ptr == 64
        assert lease.stats().allocated_bytes == MIB
        del x
        gc.collect()
        assert lease.stats().allocated_bytes == 0


@pytest.mark.fake_only
@pytest.mark.parametrize("known", [True, False])
def test_memory_belongs_to_the_stream_that_is_current(
    cupy: Cupy, interop: Any, pool: AsyncMemoryPool, cuda: Cuda, driver: FakeDriver, known: bool
) -> None:
    """It is ready there and goes back behind it: by CuPy's own stream, or by one that CuPy has only the handle of."""
    first, other = cuda.create_stream("first"), cuda.create_stream("other")
    cupy.stream = Stream(first) if known else ExternalStream(first.handle)
    with interop.use(pool):
        x = cupy.alloc(60 * MIB)
        driver.hold(first.handle)
        driver.launch(first.handle, writes=[(x.ptr, 60 * MIB)])
        cupy.stream = ExternalStream(0)
        del x
        gc.collect()
    with pool.allocate(60 * MIB, stream=other) as again:
        driver.launch(other.handle, writes=[(again.address, 60 * MIB)])
        driver.release()
    assert driver.violations() == []


@pytest.mark.fake_only
def test_array_may_outlive_a_stream_of_which_cupy_has_the_handle(
    cupy: Cupy, interop: Any, pool: AsyncMemoryPool, cuda: Cuda
) -> None:
    """Its memory goes back behind the work of all streams, and nothing is asked of a stream that is gone."""
    handle = cuda.context.create_stream()
    cupy.stream = ExternalStream(handle)
    with interop.use(pool):
        x = cupy.alloc(60 * MIB)
    cupy.stream = ExternalStream(0)
    cuda.context.destroy_stream(handle)
    del x
    gc.collect()
    assert pool._core.retire.counts().failed_records == 0
    with pool.allocate(60 * MIB, stream=cuda.create_stream("other")):
        assert pool._core.retire.counts().failed_records == 0


def test_one_card_needs_no_look_at_the_device(cupy: Cupy, interop: Any, pool: AsyncMemoryPool) -> None:
    """Errors are ours there too, and a lease that has ended serves no more."""
    cupy.devices, cupy.device = 1, 7
    with pool.lease(4 * MIB) as lease, interop.use(lease):
        for _ in range(3):
            assert cupy.alloc(4 * MIB).ptr == lease.address
        with pytest.raises(OutOfMemoryError, match="from a lease of 4 MiB"):
            cupy.alloc(8 * MIB)
        allocator = cupy.get_allocator()
    with pytest.raises(BufferReleased, match="allocating from a lease"):
        allocator(MIB)


@pytest.mark.fake_only
def test_graph_keeps_what_it_was_given(cupy: Cupy, interop: Any, pool: AsyncMemoryPool, cuda: Cuda) -> None:
    """Memory that is allocated during a capture stays the graph's, also when its array is gone."""
    from cuda.bindings import driver as calls

    cupy.devices = 1
    stream = cuda.create_stream("captured")
    cupy.stream = Stream(stream)
    with pool.graph() as memory, interop.use(pool):
        assert calls.cuStreamBeginCapture(stream.handle, calls.CUstreamCaptureMode(1))[0] == 0
        x = cupy.alloc(40 * MIB)
        address = x.ptr
        del x
        gc.collect()
        code, graph = calls.cuStreamEndCapture(stream.handle)
        assert code == 0
    with pytest.raises(OutOfMemoryError):
        pool.allocate(40 * MIB)
    calls.cuGraphDestroy(graph)
    cupy.stream = ExternalStream(0)
    memory.release()
    with pool.allocate(40 * MIB) as again:
        assert again.address == address


def test_pool_waits_on_this_thread(cupy: Cupy, interop: Any, pool: AsyncMemoryPool) -> None:
    """With a timeout, until another gives memory back."""
    held = pool.allocate(60 * MIB)

    def work() -> int:
        with interop.use(pool, timeout=30):
            return cupy.alloc(32 * MIB).mem.size

    with ThreadPoolExecutor() as threads:
        waits = threads.submit(work)
        while not pool.stats().waiting:
            assert not waits.done()
        held.free()
        assert waits.result() == 32 * MIB


@pytest.mark.asyncio
async def test_only_leases_serve_on_a_loops_thread(cupy: Cupy, interop: Any, pool: AsyncMemoryPool) -> None:
    """And no await goes on inside of the block."""
    async with pool.lease(MIB) as lease:
        with pytest.raises(InvalidRequest, match="without an await inside"), interop.use(lease):  # noqa: PT012
            assert cupy.alloc(512).ptr == lease.address
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert cupy.alloc(512).ptr == 64
    with pytest.raises(InvalidRequest, match="a lease on an event loop's thread"):
        interop.use(pool)


@pytest.mark.fake_only
def test_cupy_itself_has_this_interface(pool: AsyncMemoryPool) -> None:
    """Its own block puts our function in place of its allocator and takes it away; what the module calls is there."""
    theirs: Any = pytest.importorskip("cupy", reason="CuPy is not installed")
    with pytest.MonkeyPatch.context() as patch, pool.lease(MIB) as lease:
        patch.delitem(sys.modules, "asyncmem.interop.cupy", raising=False)
        interop = import_module("asyncmem.interop.cupy")
        patch.delitem(sys.modules, "asyncmem.interop.cupy")
        before = theirs.cuda.get_allocator()
        with pytest.raises(theirs.cuda.runtime.CUDARuntimeError), interop.use(lease):
            pass
        patch.setattr(theirs.cuda.runtime, "getDeviceCount", lambda: 1)
        with interop.use(lease), pytest.raises(theirs.cuda.runtime.CUDARuntimeError):  # it looks for its stream
            theirs.cuda.alloc(512)
        patch.setattr(interop, "_stream_here", in_c(int))
        with interop.use(lease):
            pointer = theirs.cuda.alloc(512)
            assert (pointer.ptr, pointer.mem.size, pointer.mem.device_id) == (lease.address, 512, 0)
            assert lease.stats().allocated_bytes == 512
            with pytest.raises(OutOfMemoryError):
                theirs.cuda.alloc(2 * MIB)
            del pointer
            assert lease.stats().allocated_bytes == 0
        assert theirs.cuda.get_allocator() == before
    assert {"Stream", "UnownedMemory", "get_current_stream"} <= set(dir(theirs.cuda))
    assert hasattr(theirs.cuda.runtime, "getDevice")
