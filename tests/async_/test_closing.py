"""Closing fails the waiters first, is bounded, can be repeated, and leaves held buffers valid."""

import contextlib
import threading
import time
from collections.abc import Callable, Sequence

import anyio
import pytest

from asyncmem import AsyncMemoryPool, DeviceError, LeakWarning, PoolClosed
from asyncmem.core import Buffer
from asyncmem.devices import Segment
from asyncmem.devices.base import Move, Remapped, Span
from asyncmem.pool import open_pool
from tests.conservation import whole

from .loops import Run
from .support import LIMIT, MIB, GatedDevice, make_pool, quick_device, stepped_pool, turns

pytestmark = pytest.mark.hazard("H11")


async def expect_closed(pool: AsyncMemoryPool, nbytes: int = MIB) -> None:
    with pytest.raises(PoolClosed):
        await pool.allocate_async(nbytes)


def test_waiters_hear_of_it_before_anything_else(virtually: Run) -> None:
    """Everybody who waits gets PoolClosed, although the memory they wait for is never freed."""

    async def main() -> None:
        pool = stepped_pool()
        await pool.open()
        held = await pool.allocate_async(LIMIT)
        async with anyio.create_task_group() as group:
            for _ in range(5):
                group.start_soon(expect_closed, pool)
            await turns(3)
            with pytest.warns(LeakWarning):
                await pool.aclose()
        held.free()
        whole(pool)

    virtually(main)


def test_held_buffers_stay_valid_and_are_named(virtually: Run) -> None:
    """A buffer held over the end of its pool can be used and freed; the warning names it."""

    async def main() -> Buffer:
        pool = stepped_pool()
        async with pool:
            kept = await pool.allocate_async(MIB, tag="kept")
            with pytest.warns(LeakWarning, match="kept"):
                await pool.aclose()
        assert kept.alive
        assert kept.address
        return kept

    virtually(main).free()


def free_to_the_end(buffer: Buffer, pool: AsyncMemoryPool) -> None:
    buffer.free()
    pool._opened.run(lambda: None).block(10)


def test_memory_that_cannot_go_back_after_the_end_is_told_of_and_harms_no_worker() -> None:
    """The last buffer of a closed pool is freed while the device fails: a warning, and the worker takes jobs on."""
    device = quick_device()
    pool = make_pool(device=device)
    kept = pool.allocate(MIB)
    with pytest.warns(LeakWarning):
        pool.close()
    device.fail("free_segment")
    with pytest.warns(RuntimeWarning, match="could not go back: free_segment failed"):
        free_to_the_end(kept, pool)
    assert pool._opened.worker.alive
    pool._opened.release()
    assert device.reserved == 0


def test_closing_twice_and_closing_what_never_opened_is_fine(virtually: Run) -> None:
    """aclose is idempotent, also before open; a closed pool cannot be opened again."""

    async def main() -> None:
        never = stepped_pool()
        await never.aclose()
        pool = stepped_pool()
        await pool.open()
        await pool.open()
        await pool.aclose()
        await pool.aclose()
        for closed in (never, pool):
            with pytest.raises(PoolClosed):
                await closed.open()
            with pytest.raises(PoolClosed):
                await closed.allocate_async(MIB)
            with pytest.raises(PoolClosed):
                closed.try_allocate(MIB)

    virtually(main)


def test_two_tasks_may_close_at_once(virtually: Run) -> None:
    """Concurrent aclose calls both return."""

    async def main() -> None:
        pool = stepped_pool()
        await pool.open()
        async with anyio.create_task_group() as group:
            group.start_soon(pool.aclose)
            group.start_soon(pool.aclose)

    virtually(main)


def test_closing_in_a_cancelled_scope_still_closes(virtually: Run) -> None:
    """A cancelled aclose has refused new requests and failed the waiters; a second one finishes the work."""

    async def main() -> None:
        pool = stepped_pool()
        await pool.open()
        with anyio.CancelScope() as scope:
            scope.cancel()
            await pool.aclose()
        await expect_closed(pool)
        await pool.aclose()
        assert pool.device.reserved == 0  # type: ignore[attr-defined]  # the simulated device knows

    virtually(main)


def test_drain_waits_for_buffers_to_come_back(virtually: Run) -> None:
    """aclose(drain=True) serves who waits already, waits until everything is freed, and refuses newcomers."""

    async def main() -> None:
        pool = stepped_pool()
        await pool.open()
        held = await pool.allocate_async(LIMIT)

        async def last() -> None:
            await anyio.sleep(5)
            held.free()

        async with anyio.create_task_group() as group:
            group.start_soon(last)
            await pool.aclose(timeout=60, drain=True)
        assert anyio.current_time() >= 5
        whole(pool)

    virtually(main)


def test_drain_is_bounded(virtually: Run) -> None:
    """A buffer that never comes back holds aclose up for its timeout and no longer."""

    async def main() -> None:
        pool = stepped_pool()
        await pool.open()
        held = await pool.allocate_async(MIB)
        before = anyio.current_time()
        with pytest.warns(LeakWarning):
            await pool.aclose(timeout=5, drain=True)
        assert anyio.current_time() - before == pytest.approx(5, abs=1)
        held.free()

    virtually(main)


def test_everything_goes_back_to_the_device(virtually: Run) -> None:
    """After the last buffer is freed nothing of a closed pool is left on the device."""

    async def main() -> None:
        async with stepped_pool(segment_size=2 * MIB) as pool:
            for buffer in [await pool.allocate_async(2 * MIB) for _ in range(4)]:
                buffer.free()
        assert pool.device.reserved == 0  # type: ignore[attr-defined]  # the simulated device knows

    virtually(main)


@pytest.mark.may_block
def test_closing_while_the_worker_grows_is_bounded(everywhere: Run) -> None:
    """A driver call that hangs does not hang aclose: waiters hear at once, and the late segment is not lost."""
    device = GatedDevice()

    async def main() -> AsyncMemoryPool:
        pool = make_pool(device=device)
        await pool.open()
        async with anyio.create_task_group() as group:
            group.start_soon(expect_closed, pool)
            await anyio.to_thread.run_sync(device.entered.wait, 30)
            with pytest.warns(RuntimeWarning):
                await pool.aclose(timeout=0.05)
        device.gate.set()
        return pool

    pool = everywhere(main)
    pool.check()


class SlowToGo(GatedDevice):
    """A device that takes its time over memory that comes back."""

    def free_segment(self, segment: Segment) -> None:
        time.sleep(0.02)
        super().free_segment(segment)


@pytest.mark.may_block
def test_closing_is_heard_of_when_all_has_gone_back_before(everywhere: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The request that is failed has the worker give all back, and the pool's end comes behind that in its queue."""
    monkeypatch.setattr(open_pool, "TICK", 0.001)  # so that the pool is looked after in between

    async def main() -> None:
        device = SlowToGo()
        pool = make_pool(device=device)
        await pool.open()
        async with anyio.create_task_group() as group:
            group.start_soon(expect_closed, pool)
            await anyio.to_thread.run_sync(device.entered.wait, 30)
            threading.Timer(0.02, device.gate.set).start()
            before = time.monotonic()
            await pool.aclose(timeout=10)
            assert time.monotonic() - before < 8
        assert device.reserved == 0

    everywhere(main)


@pytest.mark.may_block
def test_closing_waits_for_what_a_thread_is_getting() -> None:
    """It goes back before `close` returns, though nobody holds it."""
    device = GatedDevice()
    pool = AsyncMemoryPool(device, limit=MIB)

    def ask() -> None:
        with pytest.raises(PoolClosed):
            pool.allocate(100)

    threads = [threading.Thread(target=ask)]
    threads[0].start()
    assert device.entered.wait(30)
    threads.append(threading.Thread(target=pool.close))
    threads[1].start()
    threads[1].join(0.05)
    assert threads[1].is_alive()
    device.gate.set()
    threads[1].join()
    assert device.reserved == 0
    threads[0].join()


@pytest.mark.may_block
def test_closing_waits_for_what_came_just_behind_the_release(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread's memory comes between the release and the look at what is under way: it has gone back, too."""
    device, release = SlowToGo(), open_pool.OpenPool.release
    pool = AsyncMemoryPool(device, limit=MIB)

    def release_and_let_grow(opened: open_pool.OpenPool) -> None:
        release(opened)
        device.gate.set()
        while opened.core.scheduler.gauges()["under_way"]:
            time.sleep(0)

    def ask() -> None:
        with pytest.raises(PoolClosed):
            pool.allocate(100)

    monkeypatch.setattr(open_pool.OpenPool, "release", release_and_let_grow)
    thread = threading.Thread(target=ask)
    thread.start()
    assert device.entered.wait(30)
    pool.close()
    assert device.reserved == 0
    thread.join()


def test_leaving_the_block_closes_also_under_an_error(virtually: Run) -> None:
    """An error inside `async with pool` comes out as it is, and the pool is closed."""

    async def main() -> None:
        pool = stepped_pool()
        with pytest.raises(LookupError):
            async with pool:
                raise LookupError
        await expect_closed(pool)

    virtually(main)


@pytest.mark.may_block
@pytest.mark.filterwarnings("ignore::asyncmem.LeakWarning")  # where the closing comes between the take and the free
def test_a_pool_that_is_closed_while_it_opens_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever comes first, no worker and no memory is left."""
    made: list[open_pool.OpenPool] = []
    closing: list[threading.Thread] = []

    class Slow(open_pool.OpenPool):
        def __init__(self, pool: AsyncMemoryPool, *details: object) -> None:
            closing.append(threading.Thread(target=pool.close))
            closing[0].start()
            while not pool._closed:
                time.sleep(0.001)
            super().__init__(pool, *details)  # type: ignore[arg-type]  # handed through
            made.append(self)

    monkeypatch.setattr("asyncmem.pool.pool.OpenPool", Slow)
    pool = AsyncMemoryPool("host", limit=MIB)
    with contextlib.suppress(PoolClosed):  # the allocation may be faster
        pool.allocate(100).free()
    closing[0].join()
    assert made[0].closed is not None
    end = time.monotonic() + 30
    while not made[0].released and time.monotonic() < end:  # the worker does it, once the buffer is free
        time.sleep(0.001)
    assert made[0].released


class Lost(GatedDevice):
    """A device that is lost once the gate is open: nothing goes back."""

    def remap(self, out: Sequence[Span], into: Sequence[Span], moves: Sequence[Move] = ()) -> Remapped:
        if out and self.gate.is_set():
            raise DeviceError("cuMemUnmap", code=700, code_name="CUDA_ERROR_ILLEGAL_ADDRESS", device=self.name)
        return super().remap(out, into, moves)


@pytest.mark.may_block
def test_what_fails_behind_another_threads_job_is_raised() -> None:
    """Who closes the pool meanwhile waits for that job, and hears that its memory could not go back."""
    device = Lost()
    pool = make_pool(device=device, segments="paged")
    told: list[BaseException] = []

    def hear(call: Callable[[], object]) -> None:
        try:
            call()
        except (DeviceError, PoolClosed) as error:
            told.append(error)

    taking = threading.Thread(target=hear, args=[lambda: pool.allocate(MIB)])
    taking.start()
    assert device.entered.wait(30)
    closing = threading.Thread(target=hear, args=[pool.close])
    closing.start()
    threading.Timer(0.05, device.gate.set).start()
    with pytest.warns(RuntimeWarning, match="its memory could not go back"):
        closing.join()
    taking.join()
    assert [type(one) for one in told] == [PoolClosed, DeviceError]
