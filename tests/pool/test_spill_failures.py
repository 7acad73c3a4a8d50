"""What is left where memory cannot move, or is freed meanwhile."""

from __future__ import annotations

import asyncio
import gc
import threading

import pytest

from asyncmem import BufferReleased, DeviceError, LeakWarning, OutOfMemoryError, PoolClosed
from asyncmem.devices import Simulated
from tests.conservation import whole

from .spilling import (
    HALF,
    LIMIT,
    LONG,
    Marks,
    crowded_out,
    fill,
    holds,
    make_pool,
    run,
    stepped,
    stepped_pool,
    until,
    waiting_for,
)
from .support import MIB, quick_device


@stepped
def test_a_full_host_stops_the_moving() -> None:
    """Requests wait as they would without, until the host has room again; it is not asked over and over."""

    async def main() -> None:
        async with stepped_pool(spill_limit=HALF) as pool, Marks(pool) as marks:
            first, second, third = [await marks(HALF) for _ in range(3)]
            assert [one.spilled for one in (first, second, third)] == [True, False, False]
            request = pool.allocate_async(HALF)
            for _ in range(50):
                await asyncio.sleep(0)
            assert not request.done()
            assert not second.spilled
            assert pool.stats().remedies["spill"] == 2
            first.free()
            (await request).free()
            assert second.spilled

    run(main)


def test_a_host_without_memory_is_asked_again() -> None:
    """Others may have given some back, and nobody tells."""

    async def main() -> None:
        device = quick_device()
        pinned = device.pinned()
        assert isinstance(pinned, Simulated)
        async with make_pool(device) as pool, Marks(pool) as marks:
            marked = await marks(LIMIT)
            pinned.take_elsewhere(pinned.capacity)
            request = pool.allocate_async(LIMIT)
            await until(lambda: bool(pool._opened.spilling._refused))
            assert not request.done()
            pinned.give_back_elsewhere(pinned.capacity)
            (await request).free()
            assert marked.spilled

    run(main)


def test_without_a_limit_for_it_nothing_moves() -> None:
    """`spill_limit=0` is the way of before, and may be changed while the pool is in use."""
    with make_pool(spill_limit=0) as pool, Marks(pool) as marks:
        marked = marks.now(LIMIT)
        with pytest.raises(OutOfMemoryError):
            pool.allocate(MIB)
        assert "spill" not in pool.stats().remedies
        pool.configure(spill_limit=LIMIT)
        pool.allocate(MIB).free()
        assert marked.spilled
        assert pool._host_pool("spilled").stats().limit == LIMIT


@pytest.mark.parametrize("call", ["create_stream", "wait", "copy_out", "record"])
def test_a_copy_that_cannot_begin_fails_the_request_alone(call: str) -> None:
    """By the call's name; the memory stays where it was, and the next request may move it."""
    device = quick_device()
    stream = device.create_stream()
    with make_pool(device) as pool, Marks(pool) as marks:
        marked = marks.now(LIMIT, stream=stream)
        device.fail(call)
        with pytest.raises(DeviceError, match=call) as caught:
            pool.allocate(MIB)
        if call != "copy_out":  # whose traceback has a view of the host's memory
            assert pool._host_pool("spilled").stats().allocated_bytes == 0
        del caught
        assert not marked.spilled
        whole(pool, live=LIMIT)
        whole(pool._host_pool("spilled"))
        pool.allocate(MIB, stream=stream).free()
        assert marked.spilled
        marked.free()
        whole(pool)


@pytest.mark.parametrize("call", ["wait", "copy_in"])
def test_a_copy_home_that_fails_leaves_it_on_the_host(call: str) -> None:
    """The use fails by the call's name, and the next one has the bytes."""

    async def main() -> None:
        device = quick_device(backing=True)
        async with make_pool(device) as pool, Marks(pool) as marks:
            marked = await marks(LIMIT)
            async with marked as buffer:
                fill(buffer, 9)
            (await pool.allocate_async(LIMIT)).free()
            device.fail(call)
            with pytest.raises(DeviceError, match=call):
                async with marked:
                    pass
            assert marked.spilled
            whole(pool)
            async with marked as buffer:
                assert holds(buffer, 9)
            marked.free()
            whole(pool)

    run(main)


def test_what_is_away_when_its_pool_is_closed_says_so() -> None:
    """Its use is refused, and it can still be freed."""

    async def main() -> None:
        device = quick_device()
        pool = make_pool(device)
        await pool.open()
        marked = pool.spillable(await pool.allocate_async(LIMIT))
        (await pool.allocate_async(LIMIT)).free()
        with pytest.warns(LeakWarning, match="spilled"):
            await pool.aclose()
        with pytest.raises(PoolClosed):
            async with marked:
                pass
        with pytest.raises(PoolClosed), marked:
            pass
        assert marked.spilled
        marked.free()
        assert not marked.alive
        assert pool.stats().spilled_bytes == 0
        assert device.reserved == 0

    run(main)


def test_free_works_wherever_it_is() -> None:
    """At home, away, in use, by the buffer inside of a block, and twice."""
    with make_pool() as pool, Marks(pool) as marks:
        home, away, used, inside = (marks.now(HALF) for _ in range(4))
        assert [one.spilled for one in (home, away, used, inside)] == [True, True, False, False]
        home, away = away, home
        with used as buffer:
            used.free()
            assert not buffer.alive
        with inside as buffer:
            buffer.free()
        with home:
            pass
        for one in (home, away, used, inside):
            one.free()
            one.free()
            assert not one.alive
            assert "freed" in repr(one)
            with pytest.raises(BufferReleased), one:
                pass
        whole(pool)
        whole(pool._host_pool("spilled"))


def test_freed_while_somebody_brings_it_home() -> None:
    """Whoever waits hears that it is gone, and the memory that came for it goes back."""

    async def main() -> None:
        async with crowded_out() as (pool, marked, held):
            task = await waiting_for(pool, marked)
            marked.free()
            held.free()
            with pytest.raises(BufferReleased):
                await task
            whole(pool)

    run(main)


def test_dropping_the_handle_frees_both_sides() -> None:
    """Also from a cycle, on another thread, while the pool decides."""
    with make_pool() as pool:
        cycle: list[object] = [pool.spillable(pool.allocate(LIMIT)) for _ in range(2)]
        cycle.append(cycle)
        assert (pool.stats().spilled_bytes, pool.stats().allocated_bytes) == (LIMIT, LIMIT)
        del cycle
        thread = threading.Thread(target=gc.collect)
        with pool._opened.spilling._locked():
            thread.start()
            thread.join(LONG)
        assert (pool.stats().spilled_bytes, pool.stats().allocated_bytes) == (0, 0)
        whole(pool)
        whole(pool._host_pool("spilled"))


@pytest.mark.filterwarnings("ignore:pool .*worker ended:RuntimeWarning")
@stepped
def test_what_a_dead_worker_was_to_move_stays_usable() -> None:
    """Nobody comes to move it any more."""

    def defect() -> None:
        raise ZeroDivisionError

    async def main() -> None:
        async with stepped_pool() as pool, Marks(pool) as marks:
            marked = await marks(LIMIT)
            pool._opened.worker.submit(defect)
            with pytest.raises(PoolClosed, match="ZeroDivisionError"):
                await pool.allocate_async(LIMIT)
            async with marked as buffer:
                assert buffer.alive

    run(main)
