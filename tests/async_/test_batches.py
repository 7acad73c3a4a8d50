"""A batch is granted as a whole or not at all."""

import anyio
import pytest

from asyncmem import AsyncmemError, DeviceError, InvalidRequest, OutOfMemoryError
from tests.conservation import refillable, whole

from .loops import Run
from .support import LIMIT, MIB, quick_device, stepped_pool, turns


def test_batch_comes_in_the_order_asked(virtually: Run) -> None:
    """The buffers of a batch have the sizes asked for, in that order, and are freed together."""

    async def main() -> None:
        async with stepped_pool() as pool:
            sizes = [4096, MIB, 0, 512, 2 * MIB]
            batch = await pool.allocate_batch(sizes)
            assert [buffer.nbytes for buffer in batch] == sizes
            batch.free()
            assert not any(buffer.alive for buffer in batch)
            whole(pool)

    virtually(main)


@pytest.mark.hazard("H8")
def test_waiting_batch_holds_nothing(virtually: Run) -> None:
    """While one part does not fit, no part is taken: others may use the memory."""

    async def main() -> None:
        async with stepped_pool() as pool:
            held = await pool.allocate_async(4 * MIB)
            batch = pool.allocate_batch([3 * MIB, 3 * MIB])
            assert not batch.done()
            assert pool.stats().allocated_bytes == 4 * MIB
            passing = pool.allocate_async(2 * MIB)
            assert passing.done()
            passing.result().free()
            held.free()
            batch.result().free()
            whole(pool)

    virtually(main)


@pytest.mark.hazard("H8")
def test_cancelled_batch_gives_back_all_of_its_parts(virtually: Run) -> None:
    """A batch whose waiter is cancelled, before or after its grant, leaves nothing behind."""

    async def main() -> None:
        async with stepped_pool() as pool:
            held = await pool.allocate_async(LIMIT)
            async with anyio.create_task_group() as group:
                group.start_soon(wait, pool.allocate_batch([MIB] * 5))
                await turns(3)
                held.free()
                group.cancel_scope.cancel()
            whole(pool)
            await refillable(pool, LIMIT)

    async def wait(request: object) -> None:
        await request  # type: ignore[misc]  # any request
        await anyio.sleep(1)

    virtually(main)


@pytest.mark.hazard("H8")
@pytest.mark.parametrize("nth", [1, 2, 3])
def test_batch_whose_growth_fails_halfway_is_undone(virtually: Run, nth: int) -> None:
    """When a driver call in the middle of a batch's growth fails, the batch gets an error and holds nothing."""

    async def main() -> None:
        device = quick_device()
        async with stepped_pool(device=device, segment_size=2 * MIB) as pool:
            device.fail("allocate_segment", nth, error=DeviceError("map", code=2, code_name="NO_MEMORY"))
            try:
                batch = await pool.allocate_batch([2 * MIB] * 4)
            except AsyncmemError:
                pass
            else:
                batch.free()
            whole(pool)
            await refillable(pool, LIMIT)

    virtually(main)


def test_batch_is_served_from_free_memory_and_growth_together(virtually: Run) -> None:
    """A segment for all of it would be above the limit: the pool grows for what free memory does not hold."""

    async def main() -> None:
        async with stepped_pool(segment_size=3 * MIB) as pool:
            held = [pool.allocate(MIB)]  # of a segment of three
            held += await pool.allocate_batch([MIB] * 7, timeout=1)
            assert pool.stats().waits == 0
            del held
            whole(pool)

    virtually(main)


def test_batch_that_can_never_fit_is_refused(virtually: Run) -> None:
    """The sum of a batch is compared with the limit at once."""

    async def main() -> None:
        async with stepped_pool() as pool:
            with pytest.raises(OutOfMemoryError):
                await pool.allocate_batch([5 * MIB, 5 * MIB])
            with pytest.raises(InvalidRequest):
                pool.allocate_batch([MIB, -1])
            whole(pool)

    virtually(main)


def test_dropped_batch_drops_its_buffers(virtually: Run) -> None:
    """A batch nobody keeps is given back."""

    async def main() -> None:
        async with stepped_pool() as pool:
            batch = await pool.allocate_batch([MIB, MIB])
            first = batch[0]
            del batch
            assert pool.stats().allocated_bytes == MIB
            del first
            whole(pool)

    virtually(main)
