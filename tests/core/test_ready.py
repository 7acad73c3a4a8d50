"""A request granted at the call: every way of awaiting it gives the buffer, and none of them enters the loop."""

import asyncio
import gc
import sys
from collections.abc import Awaitable, Coroutine
from typing import Protocol

import anyio
import pytest
import trio

from asyncmem.core import Batch, Buffer, Ready
from asyncmem.errors import BufferReleased

from .support import FakePool, Missed, assert_all_free


class Door(Protocol):
    def __call__(self, size: int) -> Ready[Buffer]: ...


@pytest.fixture
def pool() -> FakePool:
    return FakePool()


@pytest.fixture
def door(pool: FakePool) -> Door:
    def ask(size: int) -> Ready[Buffer]:
        ready = pool.allocate_async(size)
        assert isinstance(ready, Ready)
        return ready

    return ask


def run(coroutine: Coroutine[object, None, object]) -> object:
    """Drive a coroutine that must not suspend."""
    try:
        coroutine.send(None)
    except StopIteration as stop:
        return stop.value
    pytest.fail("it suspended")


async def awaited(request: Awaitable[Buffer]) -> int:
    return (await request).nbytes


def test_awaiting_needs_no_loop(door: Door) -> None:
    """The await completes at the first send: there is nothing that a loop would have to do."""
    assert run(awaited(door(4096))) == 4096


@pytest.mark.asyncio
async def test_awaiting_runs_no_iteration_of_the_loop(door: Door) -> None:
    """What was scheduled before the await has not run after it."""
    ran: list[bool] = []
    asyncio.get_running_loop().call_soon(ran.append, True)
    buffer = await door(4096)
    assert buffer.alive
    assert not ran


@pytest.mark.asyncio
async def test_tasks_take_it_as_a_coroutine(door: Door) -> None:
    """create_task, gather, wait_for and TaskGroup all give the buffer."""
    assert isinstance(door(1), Coroutine)
    task = asyncio.create_task(door(1))
    async with asyncio.TaskGroup() as group:
        grouped = group.create_task(door(2))
    gathered = await asyncio.gather(door(3), door(4))
    limited = await asyncio.wait_for(door(5), 60)
    buffers = [await task, grouped.result(), *gathered, limited]
    assert [buffer.nbytes for buffer in buffers] == [1, 2, 3, 4, 5]
    assert all(buffer.alive for buffer in buffers)


def test_trio_and_anyio_await_it(door: Door) -> None:
    """It asks for no loop, so it works on any."""

    async def main() -> list[int]:
        with anyio.fail_after(60):
            return [await awaited(door(7)), (await door(8)).nbytes]

    assert trio.run(main) == [7, 8]
    assert anyio.run(main) == [7, 8]


def test_await_and_result_give_the_same_buffer_while_it_lives(door: Door, pool: FakePool) -> None:
    """After the first hand-out the request holds its buffer weakly: it neither keeps it nor invents another."""
    request = door(4096)

    async def twice() -> bool:
        first = await request
        return (await request) is first is request.result()

    assert run(twice()) is True
    assert_all_free(pool)
    with pytest.raises(BufferReleased):
        request.result()


def test_a_request_dropped_unawaited_gives_its_memory_back(door: Door, pool: FakePool) -> None:
    """Dropping or closing it before the hand-out frees the buffer."""
    door(4096)
    request = door(4096)
    request.close()
    assert_all_free(pool)
    with pytest.raises(BufferReleased):
        request.result()


def test_throwing_into_it_frees_and_raises(door: Door, pool: FakePool) -> None:
    """throw() is how frameworks cancel a coroutine that has not started: nothing stays allocated."""
    with pytest.raises(asyncio.CancelledError):
        door(4096).throw(asyncio.CancelledError)
    with pytest.raises(KeyError):
        door(4096).throw(KeyError("x"))
    assert_all_free(pool)


@pytest.mark.asyncio
async def test_a_task_cancelled_before_it_starts_gives_the_memory_back(door: Door, pool: FakePool) -> None:
    """Cancelling the task that was given the request loses nothing."""
    task = asyncio.create_task(door(4096))
    if task.cancel():  # False for an eager task, which is done already
        await asyncio.wait([task])
        assert task.cancelled()
    del task
    gc.collect()
    assert_all_free(pool)


@pytest.mark.asyncio
async def test_it_is_an_async_context_manager(door: Door, pool: FakePool) -> None:
    """The task holds the buffer inside of the block, and it is freed when that is left."""
    pool.serve()
    async with door(4096) as buffer:
        assert buffer.alive
        assert pool.held() == [4096]
    assert not buffer.alive
    assert pool.held() == []


def test_it_looks_like_a_finished_future(door: Door) -> None:
    """It is done, cannot be cancelled, and calls back at once."""
    request = door(4096)
    called: list[object] = []
    request.add_done_callback(called.append)
    assert (request.done(), request.block(), request.cancel(), request.cancelled()) == (True, True, False, False)
    assert called == [request]


def test_a_thousand_hits_in_a_row_take_the_slow_way_once(pool: FakePool) -> None:
    """A loop of hits cannot starve others for ever: the next request is the pool's, which yields."""
    for _ in range(1000):
        assert isinstance(pool.allocate_async(4096), Ready)
    with pytest.raises(Missed):
        pool.allocate_async(4096)
    pool.core.streak = 0
    assert isinstance(pool.allocate_async(4096), Ready)


def test_the_value_of_an_await_is_held_by_nobody_else(door: Door, pool: FakePool) -> None:
    """Neither a recycled StopIteration nor a recycled request keeps the buffer: dropping it frees at once."""

    async def drop() -> int:
        buffer, mine = await door(4096), object()
        assert sys.getrefcount(buffer) == sys.getrefcount(mine)
        del buffer
        return pool.core.live()

    for _ in range(3):
        assert run(drop()) == 0


def test_stop_iterations_that_are_kept_stay_as_they_are(door: Door) -> None:
    """Whoever drives it by hand may keep the StopIteration: the next await does not change its value."""
    kept: list[StopIteration] = []
    for size in (1, 2, 3):
        try:
            next(door(size).__await__())
        except StopIteration as stop:
            kept.append(stop)
    assert [stop.value.nbytes for stop in kept] == [1, 2, 3]


def test_batches_are_awaited_iterated_and_freed_together(pool: FakePool) -> None:
    """A batch has the order asked; buffers held elsewhere outlive a batch that is dropped, not one that is freed."""

    async def ask() -> Batch:
        return await pool.allocate_batch([4096, 1 << 20, 512])

    batch = run(ask())
    assert isinstance(batch, Batch)
    assert [buffer.nbytes for buffer in batch] == [4096, 1 << 20, 512]
    assert (len(batch), batch.nbytes, batch[0] in batch, batch[-1].nbytes) == (3, 4096 + (1 << 20) + 512, True, 512)
    kept = batch[1]
    del batch
    assert kept.alive
    assert pool.core.live() == 1 << 20
    with pool.allocate_batch([512, 512]).result() as more:
        pass
    assert not any(buffer.alive for buffer in more)
    kept.free()
    assert_all_free(pool)


def test_a_batch_larger_than_memory_takes_nothing(pool: FakePool) -> None:
    """All or nothing: what does not fit as a whole goes to the scheduler."""
    with pytest.raises(Missed):
        pool.allocate_batch([4096, 1 << 23, 1 << 23])
    assert_all_free(pool)


@pytest.mark.parametrize("size", ["64 MiB", 1.5, True, 0, -1, 2**63, 2**80, None, 1 << 47])
def test_what_is_no_plain_size_is_served_by_no_door(pool: FakePool, size: object) -> None:
    """The doors serve ordinary sizes only; nothing is taken for all else."""
    with pytest.raises(Missed):
        pool.allocate(size)  # type: ignore[arg-type]  # some are wrong
    with pytest.raises(Missed):
        pool.try_allocate(size, tag="x")  # type: ignore[arg-type]
    assert_all_free(pool)


def test_closed_doors_serve_nothing(pool: FakePool) -> None:
    """While a gate is closed, the pool is shut or somebody observes, no door serves a hit; the heap still does."""
    core = pool.core
    states: list[tuple[bool, bool, bool]] = [(True, True, False), (False, True, True), (False, False, False)]
    for gate, is_open, observed in states:
        core.set_gate(0, gate)
        core.open = is_open
        core.observe_all(noting=False, shut=observed)
        with pytest.raises(Missed):
            pool.allocate(4096)
        assert isinstance(pool.grant(4096), Buffer)
    core.open = True
    assert isinstance(pool.allocate(4096), Buffer)


def test_a_subclass_may_replace_a_door() -> None:
    """Subclasses get descriptors of their own for the doors' sake, but what they define themselves stays."""

    class Guarded(FakePool):
        def try_allocate(self, size: object, **_options: object) -> Buffer | None:
            return None if size == 13 else super().try_allocate(4096)

    pool = Guarded()
    assert pool.try_allocate(13) is None
    assert isinstance(pool.try_allocate(12), Buffer)
    assert isinstance(pool.allocate(13), Buffer)
    assert Guarded.allocate.__doc__ == FakePool.allocate.__doc__
