"""Marked memory moves to the host when others need the device's."""

from __future__ import annotations

import asyncio
import gc
from concurrent.futures import ThreadPoolExecutor

import pytest

from asyncmem import BufferReleased, InvalidRequest, OutOfMemoryError
from tests.conservation import whole

from .spilling import HALF, LIMIT, LONG, Marks, make_pool, run, stepped, stepped_pool, until
from .support import MIB, quick_device


@stepped
def test_the_oldest_move_and_no_more_than_the_request_needs() -> None:
    """Used last means moved last; one quarter is asked for, so one quarter goes."""

    async def main() -> None:
        async with stepped_pool() as pool, Marks(pool) as marks:
            first, second, third, fourth = [await marks(LIMIT // 4, tag=str(number)) for number in range(4)]
            async with first:
                pass
            buffer = await pool.allocate_async(LIMIT // 4)
            assert [one.spilled for one in (first, second, third, fourth)] == [False, True, False, False]
            other = await pool.allocate_async(LIMIT // 4 + 512)
            assert [one.spilled for one in (first, second, third, fourth)] == [False, True, True, True]
            stats = pool.stats()
            assert (stats.spilled_bytes, stats.spills, stats.returns) == (3 * LIMIT // 4, 3, 0)
            assert stats.remedies["spill"] == 2
            assert "3 buffers so far, 0 came back" in pool.summary()
            buffer.free()
            other.free()
            for one in (first, second, third, fourth):
                one.free()
            whole(pool)
            whole(pool._host_pool("spilled"))

    run(main)


@pytest.mark.may_block
@pytest.mark.parametrize("kept", [False, True], ids=["pool", "budget"])
def test_what_is_only_tried_moves_nothing(kept: bool) -> None:
    """A thread's `try_allocate` takes what is free, and what is asked for after it moves memory as ever."""
    with make_pool() as pool:
        share = pool.budget("kept", limit=LIMIT) if kept else pool
        one, other = (pool.device.create_stream(name) for name in ("one", "other"))
        marked = share.spillable(share.allocate(HALF, stream=one))
        share.allocate(HALF, stream=one).free()  # behind its stream, so that fences are looked at first
        with ThreadPoolExecutor(1) as thread:
            assert thread.submit(share.try_allocate, LIMIT, stream=other).result() is None
            assert not marked.spilled
            thread.submit(share.allocate, LIMIT, stream=other, timeout=LONG).result().free()
        assert marked.spilled
        marked.free()


@stepped
def test_nothing_moves_where_it_would_not_help() -> None:
    """While somebody else holds too much, the memory stays until moving it serves the request."""

    async def main() -> None:
        async with stepped_pool() as pool, Marks(pool) as marks:
            held = await pool.allocate_async(HALF)
            marked = await marks(HALF)
            request = pool.allocate_async(LIMIT)
            await asyncio.sleep(0.01)
            assert not marked.spilled
            held.free()
            (await request).free()
            assert marked.spilled

    run(main)


def test_one_that_must_stay_does_not_send_another_away() -> None:
    """Where one of two is pinned, the other alone would move for nothing."""
    with make_pool() as pool, Marks(pool) as marks:
        pinned, other = marks.now(), marks.now()
        with pinned as buffer:
            pin = buffer.pin()
        with pytest.raises(OutOfMemoryError):
            pool.allocate(LIMIT)
        assert not other.spilled
        pin.unpin()
        pool.allocate(LIMIT).free()
        assert other.spilled


@stepped
def test_nothing_moves_for_a_request_that_is_gone() -> None:
    """It was bound to move, and stays where the request ends before the worker comes to it."""

    async def main() -> None:
        async with stepped_pool() as pool, Marks(pool) as marks:
            marked = await marks(LIMIT)
            request = pool.allocate_async(LIMIT)
            request.cancel()
            async with marked:
                assert pool.stats().spills == 0
            (await pool.allocate_async(LIMIT)).free()
            assert marked.spilled

    run(main)


@stepped
def test_who_waits_behind_is_helped_too() -> None:
    """A free that serves the first of two leaves the second to be served by what may move.

    The limit is far away, so that no level of pressure is crossed, which would have everybody looked at anyway.
    """

    async def main() -> None:
        device = quick_device(LIMIT)
        async with stepped_pool(device=device, limit=8 * LIMIT) as pool, Marks(pool) as marks:
            held = await pool.allocate_async(LIMIT - MIB)
            marked = await marks(MIB)
            first, second = pool.allocate_async(LIMIT - MIB), pool.allocate_async(MIB)
            await until(lambda: not pool._opened.core.scheduler.gauges()["under_way"])
            held.free()
            one, two = await first, await second
            assert marked.spilled
            one.free()
            two.free()

    run(main)


@stepped
def test_memory_in_use_stays() -> None:
    """Whoever wants it waits for the end of the last of its blocks."""

    async def main() -> None:
        async with stepped_pool() as pool, Marks(pool) as marks:
            marked = await marks(LIMIT)
            async with marked as buffer:
                async with marked.use() as again:
                    assert again is buffer
                request = pool.allocate_async(HALF)
                await asyncio.sleep(0.01)
                assert not request.done()
                assert buffer.alive
            (await request).free()
            assert marked.spilled

    run(main)


def test_a_kept_buffer_is_dead_after_its_block() -> None:
    """Also where nothing has moved: a program that keeps it fails at once, and not only under pressure."""
    with make_pool() as pool, Marks(pool) as marks:
        buffer = pool.allocate(MIB)
        marked = marks.keep(buffer)
        with pytest.raises(BufferReleased):
            _ = buffer.address
        with marked as once:
            address = once.address
        with pytest.raises(BufferReleased):
            once.view()
        with marked as again:
            assert again.address == address
        assert pool.stats().active_buffers == 1


def test_a_zero_sized_buffer_may_be_marked() -> None:
    """It has nothing that could move."""
    with make_pool() as pool, Marks(pool) as marks:
        marked = marks.now(0)
        pool.allocate(LIMIT).free()
        assert not marked.spilled
        with marked as empty:
            assert empty.nbytes == 0


@pytest.mark.parametrize("kind", ["pin", "view"])
def test_what_others_can_reach_stays(kind: str) -> None:
    """A pin or an export outlives the block: no address may change under it."""
    device = quick_device(backing=True)
    with make_pool(device) as pool, Marks(pool) as marks:
        marked = marks.now(LIMIT)
        with marked as buffer:
            reach: object = buffer.pin() if kind == "pin" else memoryview(buffer)
        del buffer
        with pytest.raises(OutOfMemoryError):
            pool.allocate(MIB)
        assert not marked.spilled
        del reach
        gc.collect()
        pool.allocate(MIB).free()
        assert marked.spilled


def test_captured_memory_stays() -> None:
    """What a graph is being made of can be ordered behind nothing."""
    device = quick_device()
    stream, other = device.create_stream(), device.create_stream()
    with make_pool(device) as pool, Marks(pool) as marks:
        marked = marks.now(LIMIT, stream=stream)
        stream.begin_capture()
        with pytest.raises(OutOfMemoryError):
            pool.allocate(MIB)
        stream.end_capture()
        pool.allocate(MIB).free()
        assert marked.spilled
        stream.begin_capture()
        with pool.graph(), pytest.raises(InvalidRequest), marked:
            pass
        stream.end_capture()
        with marked as buffer:
            assert buffer.stream is stream
            buffer.hand_over(other)
        pool.allocate(MIB).free()
        stream.begin_capture()
        with marked as buffer:
            assert buffer.stream is other
        with pool.graph(), pytest.raises(OutOfMemoryError):
            pool.allocate(MIB, stream=stream)
        assert not marked.spilled
        stream.end_capture()


@pytest.mark.parametrize("what", ["freed", "foreign", "pinned", "no buffer"])
def test_what_cannot_be_marked_is_said_at_the_call(what: str) -> None:
    """And it stays the caller's."""
    with make_pool() as pool, Marks(pool) as marks, pytest.raises(InvalidRequest, match="priority"):
        marks.now().use(priority="high")  # type: ignore[arg-type]  # on purpose
    with make_pool() as pool, make_pool() as other:
        buffer = (other if what == "foreign" else pool).allocate(MIB)
        pin = buffer.pin() if what == "pinned" else None
        if what == "freed":
            buffer.free()
        with pytest.raises(BufferReleased if what == "freed" else InvalidRequest):
            pool.spillable("buffer" if what == "no buffer" else buffer)  # type: ignore[arg-type]  # on purpose
        assert buffer.alive is (what != "freed")
        del pin
        buffer.free()
