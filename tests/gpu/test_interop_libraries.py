"""CuPy, Numba and cuda.core on a card, with memory from a pool: where arrays lie, and what comes back and when."""

from __future__ import annotations

import asyncio
import gc
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import pytest

import asyncmem
from asyncmem import AsyncMemoryPool, InvalidRequest, Lease
from tests.conftest import close_pools, has_failed

MIB = 1 << 20
LIMIT = 1024 * MIB
LEASE = 256 * MIB

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"),
    pytest.mark.may_block,
]


@pytest.fixture
def pool(request: pytest.FixtureRequest) -> Iterator[AsyncMemoryPool]:
    """A pool beside the libraries' own memory; at the end it is whole, and nothing of it is live."""
    made = AsyncMemoryPool("cuda:0", limit=LIMIT, name="shared")
    made.open()
    yield made
    gc.collect()
    made.check()
    deadline = time.monotonic() + (0 if has_failed(request) else 10)  # its error keeps what lives in its frames
    while made.stats().allocated_bytes and time.monotonic() < deadline:
        time.sleep(0.001)
    live = made.stats().allocated_bytes
    close_pools(request, [made])
    assert has_failed(request) or not live


@pytest.fixture
def interop(cupy: Any) -> ModuleType:
    """The module under test."""
    assert cupy
    return import_module("asyncmem.interop.cupy")


def lies_in(lease: Lease, *arrays: Any) -> bool:
    return all(lease.address <= one.data.ptr < lease.address + lease.nbytes for one in arrays)


class TestCupy:
    def test_arrays_lie_in_the_lease(self, cupy: Any, interop: ModuleType, pool: AsyncMemoryPool) -> None:
        """Inside of the block, on this thread, and what they are computed to; they go back as they die."""
        with pool.lease(LEASE) as lease:
            with interop.use(lease, tag="model"):
                x = cupy.arange(MIB, dtype=cupy.int64)
                y = x * 2 + 1
                assert lies_in(lease, x, y)
                assert int(y.sum()) == MIB**2
                assert pool._core.tag_bytes()["model"] >= 16 * MIB
                with ThreadPoolExecutor(1) as other:
                    assert not lies_in(lease, other.submit(cupy.zeros, 10).result())
            assert not lies_in(lease, cupy.zeros(10))
            del x, y
            assert lease.stats().allocated_bytes == 0

    def test_nothing_and_much_are_fine(self, cupy: Any, interop: ModuleType, pool: AsyncMemoryPool) -> None:
        """An empty array has no memory; one too large for the lease raises our error, and the block goes on."""
        with pool.lease(LEASE) as lease, interop.use(lease):
            assert cupy.empty(0).size == 0
            with pytest.raises(MemoryError, match="from a lease of 256 MiB") as caught:
                cupy.empty(LEASE + 1, dtype=cupy.uint8)
            assert isinstance(caught.value, asyncmem.OutOfMemoryError)
            assert lies_in(lease, cupy.ones(10))
            del caught

    def test_blocks_nest(self, cupy: Any, interop: ModuleType, pool: AsyncMemoryPool) -> None:
        """The innermost serves, and CuPy's own allocator after all of them."""
        before = cupy.cuda.get_allocator()
        with pool.lease(LEASE) as outer, pool.lease(LEASE) as inner, interop.use(outer):
            with interop.use(inner):
                assert lies_in(inner, cupy.ones(10))
            assert lies_in(outer, cupy.ones(10))
        assert cupy.cuda.get_allocator() == before

    def test_array_outlives_lease_and_pool(self, cupy: Any, interop: ModuleType) -> None:
        """It keeps its memory and its values, also once its stream is gone."""
        short = AsyncMemoryPool("cuda:0", limit=LEASE)
        with short.lease(LEASE) as lease, interop.use(lease), cupy.cuda.Stream(non_blocking=True) as stream:
            kept = cupy.full(MIB, 7, dtype=cupy.int32)
            stream.synchronize()
        del stream
        with pytest.warns(asyncmem.LeakWarning):
            short.close()
        del short, lease
        gc.collect()
        assert bool((kept == 7).all())

    def test_streams_find_what_they_wrote(self, cupy: Any, interop: ModuleType, pool: AsyncMemoryPool) -> None:
        """Memory that goes round between streams comes behind the work of the one that had it."""
        streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(4)]
        found = []
        with pool.lease(LEASE) as lease, interop.use(lease):
            for step in range(200):
                with streams[step % 4]:
                    x = cupy.full(40 * MIB, step, dtype=cupy.uint8)
                    y = x + 1
                    found.append((y == step + 1).all())
                    del x, y
        cupy.cuda.Device().synchronize()
        assert all(bool(one) for one in found)

    def test_pool_grows_and_waits(self, cupy: Any, interop: ModuleType, pool: AsyncMemoryPool) -> None:
        """In a worker thread, until another gives memory back."""
        held = pool.allocate(LIMIT - 16 * MIB)

        def work() -> int:
            with interop.use(pool, timeout=60):
                return int(cupy.ones(64 * MIB, dtype=cupy.uint8).sum())

        with ThreadPoolExecutor(1) as threads:
            job = threads.submit(work)
            while not pool.stats().waiting and not job.done():
                time.sleep(0.001)
            held.free()
            assert job.result() == 64 * MIB

    def test_captured_graph_has_memory_of_the_pool(self, cupy: Any, interop: ModuleType, pool: AsyncMemoryPool) -> None:
        """What is allocated during a capture stays the graph's, so its replays find it."""
        stream = cupy.cuda.Stream(non_blocking=True)
        x = cupy.zeros(MIB, dtype=cupy.int32)
        _ = (x + 1) * 3  # compiled before
        cupy.cuda.Device().synchronize()
        with pool.graph() as memory, stream, interop.use(pool):
            stream.begin_capture()
            y = (x + 1) * 3
            graph = stream.end_capture()
        for value in (1, 2):
            x.fill(value)
            cupy.cuda.Device().synchronize()
            graph.launch(stream=stream)
            stream.synchronize()
            assert bool((y == 3 * (value + 1)).all())
        del y, graph
        memory.release()

    def test_tasks_have_a_lease_each(self, cupy: Any, interop: ModuleType, pool: AsyncMemoryPool) -> None:
        """More than fit wait for theirs; a block that awaits raises, and a pool is refused on the loop's thread."""

        async def serve(number: int) -> bool:
            async with pool.lease(LEASE) as lease:
                with interop.use(lease):
                    x = cupy.full(MIB, number, dtype=cupy.int64)
                    right = lies_in(lease, x) and int(x.sum()) == number * MIB
                    del x
                await asyncio.sleep(0.001)
                return right

        async def main() -> None:
            assert all(await asyncio.gather(*(serve(number) for number in range(20))))
            async with pool.lease(LEASE) as lease:
                with pytest.raises(InvalidRequest, match="without an await inside"), interop.use(lease):  # noqa: PT012
                    await asyncio.sleep(0)
                    await asyncio.sleep(0)
            with pytest.raises(InvalidRequest, match="a lease on an event loop's thread"):
                interop.use(pool)

        asyncio.run(main())


NUMBA = """
import numpy as np
from numba import cuda

import asyncmem
import asyncmem.interop.numba as interop

MIB = 1 << 20


@cuda.jit
def add(x, value):
    i = cuda.grid(1)
    if i < x.size:
        x[i] += value


with asyncmem.AsyncMemoryPool("cuda:0", limit=256 * MIB) as pool:
    streams = [cuda.stream() for _ in range(4)]
    found = []
    with pool.lease(64 * MIB) as lease, interop.use(lease):
        for step in range(100):
            stream = streams[step % 4]
            x = cuda.to_device(np.full(MIB, step, np.int32), stream=stream)
            assert lease.address <= x.device_ctypes_pointer.value < lease.address + lease.nbytes
            add[MIB // 256, 256, stream](x, 1)
            result = cuda.pinned_array(MIB, np.int32)
            x.copy_to_host(result, stream=stream)
            found.append((step, result))
            del x
    cuda.synchronize()
    assert all((result == step + 1).all() for step, result in found)
    assert pool.stats().allocated_bytes == 0
    outside = cuda.to_device(np.arange(MIB))
    assert outside.copy_to_host()[-1] == MIB - 1
    assert asyncmem.device("cuda:0").pool.stats().allocated_bytes == 8 * MIB
"""


def test_numba_allocates_from_a_lease() -> None:
    """Kernels on streams of its own find what was written for them, in memory that goes round between them."""
    if find_spec("numba_cuda") is None:
        pytest.skip("numba-cuda is not installed")
    compiles = [sys.executable, "-c", "import numba.cuda.np.arrayobj"]
    if subprocess.run(compiles, capture_output=True, check=False).returncode:
        pytest.skip("numba-cuda compiles no kernel here: it does not know this numpy")
    environment = os.environ | {"NUMBA_CUDA_MEMORY_MANAGER": "asyncmem.interop.numba"}
    command = [sys.executable, "-c", NUMBA]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False, env=environment)
    assert done.returncode == 0, done.stderr


class TestCudaCore:
    def test_device_allocates_from_the_pool(self, pool: AsyncMemoryPool) -> None:
        """Its buffers lie there, hold what is written, and go back; streams may be closed after that."""
        core: Any = pytest.importorskip("cuda.core", reason="cuda.core is not installed")
        device = core.Device(0)
        device.set_current()
        former = device.memory_resource
        device.memory_resource = pool.as_memory_resource(tag="theirs")
        try:
            for _ in range(40):  # more streams than it keeps
                first, second = device.create_stream(), device.create_stream()
                buffer = device.allocate(64 * MIB, stream=first)
                assert pool._core.tag_bytes() == {"theirs": 64 * MIB}
                buffer.fill(3, stream=first)
                second.wait(first)
                copied = device.allocate(64 * MIB, stream=second)
                copied.copy_from(buffer, stream=second)
                buffer.close(second)
                taken = asyncmem.asarray(copied, stream=second)
                assert taken.buffer.address == int(copied.handle)
                second.sync()
                del taken
                copied.close()
                first.close()
                second.close()
            assert pool.stats().allocated_bytes == 0
        finally:
            device.memory_resource = former

    def test_lease_serves_without_waiting(self, pool: AsyncMemoryPool) -> None:
        """What is too large for it raises at once."""
        core: Any = pytest.importorskip("cuda.core", reason="cuda.core is not installed")
        device = core.Device(0)
        device.set_current()
        stream = device.create_stream()
        with pool.lease(LEASE) as lease:
            resource = lease.as_memory_resource()
            buffer = resource.allocate(LEASE, stream=stream)
            assert int(buffer.handle) == lease.address
            with pytest.raises(asyncmem.OutOfMemoryError):
                resource.allocate(1, stream=stream)
            buffer.close()


class TestRmm:
    def test_buffers_come_from_the_pool(self, pool: AsyncMemoryPool) -> None:
        """Also by threads with streams of their own; each finds what it wrote, and all comes back."""
        rmm: Any = pytest.importorskip("rmm", reason="RMM is not installed")
        streams = import_module("rmm.pylibrmm.stream")
        resource = import_module("asyncmem.interop.rmm").memory_resource(pool, tag="frames", timeout=30)

        def work(value: int) -> bool:
            stream = streams.Stream()
            right = True
            for _ in range(30):
                buffer = rmm.DeviceBuffer(size=MIB, stream=stream, mr=resource)
                buffer.copy_from_host(bytes([value]) * MIB, stream)
                right &= bool((buffer.copy_to_host(stream=stream) == value).all())
                del buffer
            stream.synchronize()
            return right

        assert pool.stats().allocated_bytes == 0
        with ThreadPoolExecutor(4) as threads:
            assert all(threads.map(work, range(1, 5)))
        with pytest.raises(MemoryError, match="CUDA out of memory"):
            resource.allocate(LIMIT + 1)
        assert pool.stats().allocated_bytes == 0

    def test_pool_lies_on_a_resource(self) -> None:
        """Its segments are counted there, hold what is written, and go back."""
        rmm: Any = pytest.importorskip("rmm", reason="RMM is not installed")
        counted = rmm.mr.LimitingResourceAdaptor(rmm.mr.CudaAsyncMemoryResource(), LEASE)
        device = import_module("asyncmem.interop.rmm").ResourceDevice(counted)
        with AsyncMemoryPool(device, limit=LIMIT) as above:
            with above.allocate(64 * MIB) as buffer:
                assert counted.get_allocated_bytes() >= 64 * MIB
                device.fill(buffer.address, buffer.nbytes, 7, device.default_stream)
                found = bytearray(MIB)
                device.copy_out(memoryview(found), buffer.address + 63 * MIB, device.default_stream)
                assert found == b"\7" * MIB
            with pytest.raises(asyncmem.OutOfMemoryError):
                above.allocate(LEASE + MIB)
        assert counted.get_allocated_bytes() == 0
        device.close()


JAX = """
import gc
import jax
import jax.numpy as jnp
import asyncmem

assert jax.default_backend() == "gpu"


async def main():
    async with asyncmem.AsyncMemoryPool("cuda:0", limit="256 MiB") as pool:
        for value in range(20):
            x = await pool.full((1 << 20,), value, "float32")
            y = jax.dlpack.from_dlpack(x)
            x.buffer.free()
            z = y * 2 + 1
            del y
            assert bool((z == 2 * value + 1).all())
            back = asyncmem.asarray(z)
            mine = await pool.empty((1 << 20,), "float32")
            await mine.copy_from(back)
            del back, z
            found = jax.dlpack.from_dlpack(mine)
            assert bool((found == 2 * value + 1).all())
            del found
            mine.buffer.free()
        gc.collect()
        assert pool.stats().exported_bytes == 0, pool.stats()


asyncmem.run(main)
"""


def test_jax_exchanges_arrays_by_dlpack() -> None:
    """In both directions, in the order of its stream; a process of its own, since JAX takes most of the memory else."""
    if find_spec("jax") is None:
        pytest.skip("JAX is not installed")
    environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    command = [sys.executable, "-W", "ignore", "-c", JAX]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False, env=environment)
    if "default_backend" in done.stderr:
        pytest.skip("JAX has no GPU here")
    assert done.returncode == 0, done.stderr
