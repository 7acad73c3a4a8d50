"""A handle that was given back knows it: every use raises by name, and giving it back again changes nothing."""

import os
import pickle
import sys

import pytest

from asyncmem import AsyncMemoryPool, BufferReleased, InvalidRequest, PoolClosed
from asyncmem.core import Buffer
from asyncmem.devices import Latencies, Simulated
from tests.conservation import whole

from .loops import Run
from .support import LIMIT, MIB, make_pool, stepped_pool


def backed_pool() -> AsyncMemoryPool:
    """A pool whose buffers the host can read."""
    return stepped_pool(device=Simulated(latencies=Latencies.zero(), backing=True))


USES = {
    "address": lambda buffer: buffer.address,
    "view": lambda buffer: buffer.view("uint8"),
    "memoryview": memoryview,
    "array interface": lambda buffer: buffer.__array_interface__,
    "dlpack": lambda buffer: buffer.__dlpack__(),
    "use_on": lambda buffer: buffer.use_on(buffer.device.default_stream),
    "hand_over": lambda buffer: buffer.hand_over(buffer.device.default_stream),
    "with": lambda buffer: buffer.__enter__(),
}


@pytest.mark.hazard("H20")
@pytest.mark.parametrize("use", USES)
def test_freed_buffer_refuses_every_use(virtually: Run, use: str) -> None:
    """Whatever is done with a buffer after free() raises BufferReleased, whoever has the memory by then."""

    async def main() -> None:
        async with backed_pool() as pool:
            buffer = await pool.allocate_async(MIB, tag="mine")
            buffer.free()
            async with pool.allocate_async(MIB):
                with pytest.raises((BufferReleased, BufferError)) as caught:
                    USES[use](buffer)
                assert isinstance(caught.value, BufferReleased) or isinstance(caught.value.__cause__, BufferReleased)
            whole(pool)

    virtually(main)


@pytest.mark.hazard("H20")
def test_freeing_again_changes_nothing(virtually: Run) -> None:
    """A second free() does not touch memory that belongs to somebody else by now."""

    async def main() -> None:
        async with stepped_pool() as pool:
            first = await pool.allocate_async(MIB)
            first.free()
            second = await pool.allocate_async(MIB)
            first.free()
            with first if first.alive else second:
                first.free()
            assert not second.alive
            third = await pool.allocate_async(MIB)
            first.free()
            second.free()
            assert third.alive
            assert pool.stats().allocated_bytes == MIB
            third.free()
            whole(pool)

    virtually(main)


@pytest.mark.hazard("H20")
def test_export_keeps_the_memory_and_not_the_buffer(virtually: Run) -> None:
    """free() under a live memoryview kills the buffer at once; the bytes go back when the view does."""

    async def main() -> None:
        async with backed_pool() as pool:
            buffer = await pool.allocate_async(MIB)
            view = memoryview(buffer)
            buffer.free()
            assert not buffer.alive
            assert pool.stats().exported_bytes == MIB
            request = pool.allocate_async(LIMIT)
            assert not request.done()
            view.release()
            (await request).free()
            assert pool.stats().exported_bytes == 0
            whole(pool)

    virtually(main)


@pytest.mark.hazard("H20")
def test_request_hands_out_its_buffer_weakly(virtually: Run) -> None:
    """After the first hand-out the request no longer owns the buffer, and says so when it is gone."""

    async def main() -> None:
        async with stepped_pool() as pool:
            held = await pool.allocate_async(LIMIT)
            waited = pool.allocate_async(MIB)
            held.free()
            hit = pool.allocate_async(MIB)
            for request in (waited, hit):
                buffer = await request
                assert request.result() is buffer
                assert await request is buffer
                del buffer
                with pytest.raises(BufferReleased):
                    request.result()
                with pytest.raises(BufferReleased):
                    await request
            whole(pool)

    virtually(main)


@pytest.mark.hazard("H20")
def test_ended_lease_refuses_new_allocations(virtually: Run) -> None:
    """A lease whose block has ended names that; what was taken from it stays valid until it is freed."""

    async def main() -> None:
        async with stepped_pool() as pool:
            async with pool.lease(2 * MIB) as lease:
                kept = await lease.allocate_async(MIB)
            with pytest.raises(BufferReleased):
                await lease.allocate_async(MIB)
            assert kept.alive
            assert pool.stats().allocated_bytes == MIB
            kept.free()
            whole(pool)

    virtually(main)


@pytest.mark.hazard("H25")
def test_pool_and_buffer_cannot_be_pickled(virtually: Run) -> None:
    """A pool, or a buffer of it, means nothing in another process."""

    async def main() -> None:
        async with stepped_pool() as pool, pool.allocate_async(MIB) as buffer:
            for thing in (pool, buffer):
                with pytest.raises(TypeError):
                    pickle.dumps(thing)

    virtually(main)


@pytest.mark.hazard("H25")
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # what 3.12 says of fork beside threads
def test_forked_child_is_told_and_touches_nothing() -> None:
    """In a child every door of a pool raises PoolClosed and says why, and free() leaves the parent's memory alone."""
    pool = make_pool()
    buffer = pool.allocate(MIB)
    child = os.fork()
    if not child:
        os._exit(0 if _child_is_refused(pool, buffer) else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert buffer.alive
    buffer.free()
    whole(pool)
    pool.allocate(LIMIT).free()
    pool.close()


def _child_is_refused(pool: AsyncMemoryPool, buffer: Buffer) -> bool:
    refused = 0
    doors = (
        lambda: pool.allocate(MIB),
        lambda: pool.try_allocate(MIB),
        lambda: pool.allocate_async(MIB).result(),
        lambda: pool.allocate_batch([MIB]).result(),
    )
    for door in doors:
        try:
            door()
        except PoolClosed as error:
            refused += "fork" in str(error)
    buffer.free()
    sys.stdout.flush()
    return refused == len(doors)


def test_buffer_of_another_device_is_refused(virtually: Run) -> None:
    """Streams of another device are named and refused, at the call."""

    async def main() -> None:
        other = Simulated(index=3)
        async with stepped_pool() as pool, pool.allocate_async(MIB) as buffer:
            for use in (
                lambda: pool.allocate_async(MIB, stream=other.default_stream),
                lambda: pool.allocate(MIB, stream=other.create_stream()),
                lambda: buffer.use_on(other.default_stream),
                lambda: buffer.hand_over(other.default_stream),
            ):
                with pytest.raises(InvalidRequest):
                    use()
            assert buffer.alive
        whole(pool)

    virtually(main)
