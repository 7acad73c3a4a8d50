"""RMM allocates from pools, budgets and leases; and a pool lies on top of a resource of RMM's."""

import gc
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from asyncmem import AsyncMemoryPool, InvalidRequest, OutOfMemoryError
from asyncmem.devices import Cuda, Simulated
from tests.cuda.fake import FakeDriver

from .conftest import MIB

rmm: Any = pytest.importorskip("rmm", reason="RMM is not installed")
streams: Any = pytest.importorskip("rmm.pylibrmm.stream", reason="RMM is not installed")
interop: Any = pytest.importorskip("asyncmem.interop.rmm")


class TestResource:
    """RMM's users take memory from a share."""

    def test_memory_comes_from_the_pool_and_goes_back(self, pool: AsyncMemoryPool, cuda: Cuda) -> None:
        """It counts under the tag, and any thread may free it."""
        stream = streams.Stream(cuda.create_stream())
        resource = interop.memory_resource(pool, tag="theirs")
        address = resource.allocate(MIB, stream)
        assert pool._core.tag_bytes() == {"theirs": MIB}
        with ThreadPoolExecutor() as threads:
            threads.submit(resource.deallocate, address, MIB, stream).result()
        assert pool.stats().allocated_bytes == 0
        resource.deallocate(resource.allocate(0, stream), 0, stream)

    def test_pool_of_rmms_may_outlive_its_python(self, pool: AsyncMemoryPool) -> None:
        """Its C++ gives its memory back by our calls, which are there although nobody in Python has them any more."""

        def make() -> None:
            above = [rmm.mr.PoolMemoryResource(interop.memory_resource(pool), MIB)]
            above[0].deallocate(above[0].allocate(1000), 1000)
            above.append(above)  # so that the collector clears them, in an order of its own

        for _ in range(20):
            make()
            assert pool.stats().allocated_bytes == MIB
            gc.collect()
            assert pool.stats().allocated_bytes == 0

    def test_full_share_raises_with_all_facts(self, pool: AsyncMemoryPool) -> None:
        """By RMM's own kind of error, in our words, also through another resource that lies above."""
        with pool.lease(MIB) as lease:
            above = rmm.mr.LimitingResourceAdaptor(interop.memory_resource(lease, tag="theirs"), 8 * MIB)
            address = above.allocate(MIB // 2)
            assert address == lease.address
            with pytest.raises(MemoryError, match=r"from a lease of 1 MiB.*'theirs' 512 KiB"):
                above.allocate(MIB)
            above.deallocate(address, MIB // 2)
            assert lease.stats().allocated_bytes == 0

    def test_thread_waits_for_memory(self, pool: AsyncMemoryPool) -> None:
        """With a timeout, until another gives some back."""
        resource = interop.memory_resource(pool, timeout=30)
        held = resource.allocate(60 * MIB)
        with ThreadPoolExecutor() as threads:
            waits = threads.submit(resource.allocate, 32 * MIB)
            while not pool.stats().waiting:
                assert not waits.done()
            resource.deallocate(held, 60 * MIB)
            resource.deallocate(waits.result(), 32 * MIB)

    @pytest.mark.fake_only
    def test_memory_goes_back_behind_the_stream_of_the_free(
        self, pool: AsyncMemoryPool, cuda: Cuda, driver: FakeDriver
    ) -> None:
        """Whoever gets it next comes behind the work of that stream."""
        resource = interop.memory_resource(pool)
        first, last, other = (cuda.create_stream(name) for name in ("first", "last", "other"))
        address = resource.allocate(60 * MIB, streams.Stream(first))
        last.wait(first.record())
        driver.hold(last.handle)
        driver.launch(last.handle, writes=[(address, 60 * MIB)])
        resource.deallocate(address, 60 * MIB, streams.Stream(last))
        with pool.allocate(60 * MIB, stream=other) as again:
            driver.launch(other.handle, writes=[(again.address, 60 * MIB)])
            driver.release()
        assert driver.violations() == []

    def test_memory_of_another_kind_is_refused(self) -> None:
        """RMM's resources are CUDA's memory."""
        with AsyncMemoryPool(Simulated(), limit=MIB) as other, pytest.raises(InvalidRequest, match="CUDA device"):
            interop.memory_resource(other)


class TestDevice:
    """A pool takes its segments from a resource of RMM's."""

    def test_segments_come_from_the_resource(self, pool: AsyncMemoryPool) -> None:
        """And go back to it when the pool does not need them, or ends."""
        below = rmm.mr.LimitingResourceAdaptor(interop.memory_resource(pool), 32 * MIB)
        device = interop.ResourceDevice(below)
        assert below.get_allocated_bytes() == 0
        with AsyncMemoryPool(device, limit=64 * MIB, segment_size=8 * MIB, min_free=0) as above:
            with above.allocate(8 * MIB), above.allocate(6 * MIB):
                assert below.get_allocated_bytes() == 16 * MIB == above.stats().reserved_bytes
            above.empty_cache()
            assert below.get_allocated_bytes() == 0
            above.allocate(MIB).free()
            above.check()
        assert below.get_allocated_bytes() == 0
        device.close()

    def test_full_resource_is_an_error_of_the_device(self, pool: AsyncMemoryPool) -> None:
        """The pool's limit is larger than what RMM has, so the device refuses."""
        below = rmm.mr.LimitingResourceAdaptor(interop.memory_resource(pool), 32 * MIB)
        device = interop.ResourceDevice(below)
        with AsyncMemoryPool(device, limit=60 * MIB, segment_size=8 * MIB, min_free=0) as above:
            with above.allocate(24 * MIB), pytest.raises(OutOfMemoryError) as caught:
                above.allocate(16 * MIB)
            assert caught.value.cause == "device"
            del caught
            above.allocate(16 * MIB).free()
        device.close()

    def test_other_things_are_no_resource(self) -> None:
        """They are refused before a GPU is touched."""
        with pytest.raises(InvalidRequest, match="a memory resource of RMM's"):
            interop.ResourceDevice("cuda:0")
