"""Marked memory moves to the host when others need the device's, and comes home when it is used."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Awaitable, Callable
from typing import Self

import numpy as np
import pytest

from asyncmem import (
    AsyncMemoryPool,
    BufferReleased,
    DeadlockError,
    DeviceError,
    InvalidRequest,
    LeakWarning,
    OutOfMemoryError,
    PoolClosed,
    PoolTimeout,
    Spillable,
)
from asyncmem.core import Buffer
from asyncmem.devices import Latencies, Simulated
from asyncmem.testing.conservation import whole

from .support import MIB, SteppedPool, quick_device

HALF = 4 * MIB
LIMIT = 2 * HALF
LONG = 30  # seconds that nothing here takes


stepped = pytest.mark.may_block  # the worker's calls are steps of the loop


def make_pool(
    device: Simulated | None = None, kind: type[AsyncMemoryPool] = AsyncMemoryPool, **options: object
) -> AsyncMemoryPool:
    """A pool that two halves fill."""
    settings: dict[str, object] = {"limit": LIMIT, "segment_size": HALF, "stall_after": None, **options}
    return kind(device or quick_device(), **settings)  # type: ignore[arg-type]  # what tests pass


def stepped_pool(**options: object) -> AsyncMemoryPool:
    """The same with a worker that is steps of the loop and never ticks: whoever is helped is helped by an event."""
    return make_pool(kind=SteppedPool, **options)


class Marks:
    """Makes marked buffers, and frees them at the end of its block; then nothing may be left on either side."""

    def __init__(self, pool: AsyncMemoryPool) -> None:
        self.pool = pool
        self.made: list[Spillable] = []

    def now(self, nbytes: int = HALF, **terms: object) -> Spillable:
        """Allocate and mark, on a thread."""
        return self.keep(self.pool.allocate(nbytes, **terms))  # type: ignore[arg-type]  # what tests pass

    async def __call__(self, nbytes: int = HALF, **terms: object) -> Spillable:
        """Allocate and mark, on a loop."""
        return self.keep(await self.pool.allocate_async(nbytes, **terms))  # type: ignore[arg-type]  # what tests pass

    def keep(self, buffer: Buffer) -> Spillable:
        """Mark what was allocated."""
        self.made.append(self.pool.spillable(buffer))
        return self.made[-1]

    def __enter__(self) -> Self:
        """Answer itself."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        """Free all, and look whether anything is left."""
        for one in self.made:
            one.free()
        if error is None:
            whole(self.pool)
            whole(self.pool.spilled.of(self.pool))

    async def __aenter__(self) -> Self:
        """Answer itself."""
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        """Free all, and look."""
        self.__exit__(kind, error, trace)


def fill(buffer: Buffer, value: int) -> None:
    """Write a pattern by the host."""
    np.asarray(buffer)[:] = value


def holds(buffer: Buffer, value: int) -> bool:
    """Look whether the pattern is there."""
    return bool((np.asarray(buffer) == value).all())


def run(main: Callable[[], Awaitable[None]]) -> None:
    """Run on asyncio, but not for ever."""

    async def bounded() -> None:
        async with asyncio.timeout(LONG):
            await main()

    asyncio.run(bounded())


async def until(condition: Callable[[], bool]) -> None:
    """Wait for what another task or thread does."""
    while not condition():  # noqa: ASYNC110 -- what it waits for tells nobody
        await asyncio.sleep(0.001)


# -- what moves --------------------------------------------------------------------------------------------------------


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
            assert stats.rungs["spill"] == 2
            assert "3 buffers so far, 0 came back" in pool.summary()
            buffer.free()
            other.free()
            for one in (first, second, third, fourth):
                one.free()
            whole(pool)
            whole(pool.spilled.of(pool))

    run(main)


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
            await until(lambda: not pool.flow.busy)
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


@pytest.mark.parametrize("what", ["freed", "foreign", "pinned", "leased", "no buffer"])
def test_what_cannot_be_marked_is_said_at_the_call(what: str) -> None:
    """And it stays the caller's."""
    with make_pool() as pool, make_pool() as other, pool.lease(MIB) as lease:
        buffer = {"foreign": other, "leased": lease}.get(what, pool).allocate(MIB)
        pin = buffer.pin() if what == "pinned" else None
        if what == "freed":
            buffer.free()
        with pytest.raises(BufferReleased if what == "freed" else InvalidRequest):
            pool.spillable("buffer" if what == "no buffer" else buffer)  # type: ignore[arg-type]  # on purpose
        assert buffer.alive is (what != "freed")
        del pin
        buffer.free()


# -- coming home -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["simulated", "host"])
def test_every_block_sees_its_own_bytes(name: str) -> None:
    """Six halves take turns over two, and each is changed by each block."""

    async def main() -> None:
        device = quick_device(backing=True) if name == "simulated" else "host"
        async with AsyncMemoryPool(device, limit=LIMIT, segment_size=HALF) as pool:
            marked = []
            for number in range(6):
                buffer = await pool.allocate_async(HALF)
                fill(buffer, number)
                marked.append(pool.spillable(buffer))
            for turn in range(3):
                for number, one in enumerate(marked):
                    async with one as buffer:
                        assert holds(buffer, number + turn)
                        fill(buffer, number + turn + 1)
            assert pool.stats().returns == 18
            assert pool.stats().peak_allocated <= LIMIT
            for one in marked:
                one.free()
            whole(pool)

    run(main)


def test_two_that_bring_each_other_out_take_turns() -> None:
    """Over a limit that fits one: each use is followed by the other's, and none is cut short."""

    async def main() -> None:
        async with make_pool(quick_device(backing=True)) as pool, Marks(pool) as marks:
            marked = [await marks(LIMIT) for _ in range(2)]
            for one in marked:
                async with one as buffer:
                    fill(buffer, 0)

            async def work(one: Spillable) -> None:
                for turn in range(20):
                    async with one as buffer:
                        assert holds(buffer, turn)
                        await asyncio.sleep(0)
                        fill(buffer, turn + 1)

            await asyncio.gather(*map(work, marked))
            assert pool.stats().returns >= 20

    run(main)


def test_tasks_that_want_the_same_bring_it_home_once() -> None:
    """They share one request, so a limit that fits one copy is enough."""

    async def main() -> None:
        async with make_pool() as pool, Marks(pool) as marks:
            marked = await marks(LIMIT)
            held = await pool.allocate_async(LIMIT)
            inside = 0

            async def work() -> None:
                nonlocal inside
                async with marked:
                    inside += 1
                    await until(lambda: inside == 3)

            tasks = [asyncio.create_task(work()) for _ in range(3)]
            await until(lambda: pool.stats().waiting == 1)
            held.free()
            await asyncio.gather(*tasks)
            assert pool.stats().returns == 1

    run(main)


def test_another_goes_on_where_the_first_is_cancelled() -> None:
    """Nothing is lost with whoever was bringing it home."""

    async def main() -> None:
        async with make_pool() as pool, Marks(pool) as marks:
            marked = await marks(LIMIT)
            held = await pool.allocate_async(LIMIT)

            async def work() -> None:
                async with marked:
                    pass

            first = asyncio.create_task(work())
            await until(lambda: pool.stats().waiting == 1)
            second = asyncio.create_task(work())
            await asyncio.sleep(0)
            first.cancel()
            await asyncio.wait([first])
            assert first.cancelled()
            await until(lambda: pool.stats().waiting == 1)
            held.free()
            await second
            marked.free()
            whole(pool)

    run(main)


def test_a_use_may_be_limited_in_time() -> None:
    """Its own request's, and a wait for somebody else's."""

    async def main() -> None:
        async with make_pool() as pool, Marks(pool) as marks:
            marked = await marks(LIMIT)
            held = await pool.allocate_async(LIMIT)
            with pytest.raises(PoolTimeout):
                async with marked.use(timeout=0.01):
                    pass

            async def patient() -> None:
                async with marked:
                    pass

            other = asyncio.create_task(patient())
            await until(lambda: pool.stats().waiting == 1)
            with pytest.raises(PoolTimeout):
                async with marked.use(timeout=0.01):
                    pass
            assert pool.stats().timeouts == 2
            held.free()
            await other

    run(main)


def test_urgent_uses_come_first() -> None:
    """The priority is that of the request."""

    async def main() -> None:
        async with make_pool() as pool, Marks(pool) as marks:
            marked = [await marks(LIMIT), await marks(LIMIT)]
            held = await pool.allocate_async(LIMIT)
            order = []

            async def work(number: int, priority: int) -> None:
                async with marked[number].use(priority=priority):
                    order.append(number)

            tasks = [asyncio.create_task(work(0, 0)), asyncio.create_task(work(1, 5))]
            await until(lambda: pool.stats().waiting == 2)
            held.free()
            await asyncio.gather(*tasks)
            assert order == [1, 0]

    run(main)


def test_a_budget_is_charged_for_what_is_at_home() -> None:
    """What is away leaves room in its budget, and comes home through its queue."""
    with make_pool() as pool, Marks(pool) as marks:
        budget = pool.budget("stage", limit=HALF)
        marks.made.append(marked := budget.spillable(budget.allocate(HALF)))
        pool.allocate(LIMIT).free()
        assert budget.stats().allocated_bytes == 0
        held = budget.allocate(HALF)
        with pytest.raises(OutOfMemoryError), marked:
            pass
        held.free()
        with marked:
            assert budget.stats().allocated_bytes == HALF


# -- the order of streams ----------------------------------------------------------------------------------------------


def test_moving_waits_for_nothing_but_orders_everything() -> None:
    """Work of an hour on two streams lies before the copy; the request has its memory at once, behind all of it.

    The checker of the simulated device raises where anything is out of order.
    """
    device = quick_device()
    home, other, taker = (device.create_stream() for _ in range(3))
    with make_pool(device) as pool, Marks(pool) as marks:
        marked = marks.now(LIMIT, stream=home)
        with marked as buffer:
            home.launch(3600.0, writes=[buffer])
        with marked.use(other) as buffer:
            other.launch(3600.0, writes=[buffer])
        taken = pool.allocate(LIMIT, stream=taker)
        assert device.now == 0
        taker.launch(1.0, writes=[taken])
        taken.free()
        with marked as buffer:
            assert device.now == 0
            home.launch(1.0, writes=[buffer])
        again = pool.allocate(LIMIT, stream=other)
        other.launch(1.0, writes=[again])
        again.free()
        marked.free()
        device.run_until_idle()
        assert device.now > 7200
        whole(pool)
        whole(pool.spilled.of(pool))


def test_memory_of_streams_that_nobody_named_moves_behind_all_of_them() -> None:
    """An export to an unknown consumer is ordered by a fence of the whole device."""
    device = quick_device()
    home, unknown = device.create_stream(), device.create_stream()
    with make_pool(device) as pool, Marks(pool) as marks:
        marked = marks.now(LIMIT, stream=home)
        with marked as buffer:
            buffer.use_on(None)
            unknown.wait(home.record())
            unknown.launch(3600.0, writes=[buffer])
        taken = pool.allocate(LIMIT, stream=home)
        home.launch(1.0, writes=[taken])
        taken.free()
        device.run_until_idle()


def test_free_names_the_last_stream() -> None:
    """As a buffer's free does; a wrong one changes nothing."""
    device = quick_device()
    home, other = device.create_stream(), device.create_stream()
    with make_pool(device) as pool, Marks(pool) as marks:
        marked = marks.now(LIMIT, stream=home)
        with pytest.raises(InvalidRequest):
            marked.free(quick_device().create_stream())
        with marked as buffer:
            other.wait(home.record())
            other.launch(3600.0, writes=[buffer])
        marked.free(other)
        taken = pool.allocate(LIMIT, stream=home)
        home.launch(1.0, writes=[taken])
        taken.free()
        device.run_until_idle()


def test_who_comes_during_the_copy_comes_after_the_request() -> None:
    """Where the host may touch memory, the copy is waited for; a use that comes meanwhile does not barge in."""
    device = Simulated(64 * MIB, backing=True, autojump=False, latencies=Latencies.zero())
    stream = device.create_stream()
    with make_pool(device) as pool, Marks(pool) as marks:
        marked = marks.now(LIMIT, stream=stream)
        with marked as buffer:
            fill(buffer, 7)
            stream.launch(1.0, writes=[buffer])
        order: list[str] = []

        def ask() -> None:
            with pool.allocate(LIMIT, timeout=LONG) as buffer:
                order.append("request")
                fill(buffer, 0)

        def use() -> None:
            with marked.use(timeout=LONG) as buffer:
                order.append("use" if holds(buffer, 7) else "other bytes")

        threads = [threading.Thread(target=ask), threading.Thread(target=use)]
        threads[0].start()
        while not device.calls_of("block"):
            threads[0].join(0.001)
        threads[1].start()
        while any(one.is_alive() for one in threads):
            device.advance(10)
            threads[1].join(0.001)
        assert order == ["request", "use"]


# -- the host's side ---------------------------------------------------------------------------------------------------


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
            assert pool.stats().rungs["spill"] == 2
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
            await until(lambda: pool.flow.spilling.refused is not None)
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
        assert "spill" not in pool.stats().rungs
        pool.configure(spill_limit=LIMIT)
        pool.allocate(MIB).free()
        assert marked.spilled
        assert pool.spilled.of(pool).stats().limit == LIMIT


# -- failures ----------------------------------------------------------------------------------------------------------


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
            assert pool.spilled.of(pool).stats().allocated_bytes == 0
        del caught
        assert not marked.spilled
        whole(pool, live=LIMIT)
        whole(pool.spilled.of(pool))
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
        assert marked.is_freed
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
            assert buffer.is_freed
        with inside as buffer:
            buffer.free()
        with home:
            pass
        for one in (home, away, used, inside):
            one.free()
            one.free()
            assert one.is_freed
            assert "freed" in repr(one)
            with pytest.raises(BufferReleased), one:
                pass
        whole(pool)
        whole(pool.spilled.of(pool))


def test_freed_while_somebody_brings_it_home() -> None:
    """Whoever waits hears that it is gone, and the memory that came for it goes back."""

    async def main() -> None:
        async with make_pool() as pool, Marks(pool) as marks:
            marked = await marks(LIMIT)
            held = await pool.allocate_async(LIMIT)

            async def work() -> None:
                async with marked:
                    raise AssertionError

            task = asyncio.create_task(work())
            await until(lambda: pool.stats().waiting == 1)
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
        with pool.flow.turn:
            thread.start()
            thread.join(LONG)
        assert (pool.stats().spilled_bytes, pool.stats().allocated_bytes) == (0, 0)
        whole(pool)
        whole(pool.spilled.of(pool))


@pytest.mark.filterwarnings("ignore:pool .*worker ended:RuntimeWarning")
@stepped
def test_what_a_dead_worker_was_to_move_stays_usable() -> None:
    """Nobody comes to move it any more."""

    def defect() -> None:
        raise ZeroDivisionError

    async def main() -> None:
        async with stepped_pool() as pool, Marks(pool) as marks:
            marked = await marks(LIMIT)
            pool.house.worker.submit(defect)
            with pytest.raises(PoolClosed, match="ZeroDivisionError"):
                await pool.allocate_async(LIMIT)
            async with marked as buffer:
                assert buffer.alive

    run(main)


# -- deadlocks ---------------------------------------------------------------------------------------------------------


def test_idle_memory_is_held_against_nobody() -> None:
    """Two owners whose memory may move wait for more than is free: both are served."""

    async def main() -> None:
        async with make_pool() as pool, Marks(pool):
            started = asyncio.Event()

            async def work(number: int) -> None:
                with pool.owner(f"owner {number}"):
                    marked = pool.spillable(await pool.allocate_async(HALF))
                    await started.wait()
                    async with pool.allocate_async(LIMIT):
                        assert marked.spilled
                    marked.free()

            tasks = [asyncio.create_task(work(number)) for number in range(2)]
            await until(lambda: pool.stats().allocated_bytes == LIMIT)
            started.set()
            await asyncio.gather(*tasks)

    run(main)


def test_uses_that_wait_for_each_other_are_a_deadlock() -> None:
    """Each is in a block and wants what the other's memory has the room of: one is refused, the other goes on."""

    async def main() -> None:
        async with make_pool() as pool, Marks(pool) as marks:
            first, second = await marks(LIMIT // 2 + 512), await marks(LIMIT // 2 + 512)
            small = [await marks(MIB), await marks(MIB)]
            ends = []
            both = asyncio.Barrier(2)

            async def work(mine: Spillable, other: Spillable) -> None:
                try:
                    async with mine:
                        await both.wait()
                        async with other:
                            ends.append("served")
                except DeadlockError:
                    ends.append("refused")

            await asyncio.gather(work(small[0], first), work(small[1], second))
            assert ends == ["served", "served"]
            ends.clear()
            large = [await marks(LIMIT - MIB) for _ in range(2)]
            held = [await marks(MIB), await marks(MIB)]
            await asyncio.gather(work(held[0], large[0]), work(held[1], large[1]))
            assert sorted(ends) == ["refused", "served"]

    run(main)


def test_whoever_waits_for_another_to_bring_it_home_waits() -> None:
    """One holds what the other's request needs, and waits for that other: a circle, with one of them in the queue."""

    async def main() -> None:
        async with make_pool() as pool, Marks(pool) as marks:
            wanted = await marks(LIMIT)
            mine = await marks(MIB)
            ends: list[str] = []

            async def bring() -> None:
                try:
                    async with wanted:
                        ends.append("brought")
                except DeadlockError:
                    ends.append("refused")

            async def follow() -> None:
                try:
                    async with mine:
                        task.append(asyncio.create_task(bring()))
                        await until(lambda: pool.stats().waiting == 1)
                        async with wanted:
                            ends.append("served")
                except DeadlockError:
                    ends.append("follower refused")

            task: list[asyncio.Task[None]] = []
            async with mine:
                pass
            await follow()
            await task[0]
            assert ends == ["refused", "follower refused"]
            mine.free()
            async with wanted:
                pass

    run(main)


# -- threads -----------------------------------------------------------------------------------------------------------


def test_threads_take_turns() -> None:
    """Each waits for as long as it says; each sees its own bytes."""
    with make_pool(quick_device(backing=True)) as pool, Marks(pool) as marks:
        marked = [marks.now(LIMIT) for _ in range(3)]
        for one in marked:
            with one as buffer:
                fill(buffer, 0)
        wrong: list[object] = []

        def work(one: Spillable) -> None:
            try:
                for turn in range(8):
                    with one.use(timeout=LONG) as buffer:
                        if not holds(buffer, turn):
                            wrong.append((one, turn))
                        fill(buffer, turn + 1)
            except BaseException as error:
                wrong.append(error)
                raise

        threads = [threading.Thread(target=work, args=(one,)) for one in marked]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(2 * LONG)
        assert not wrong
        for one in marked:
            one.free()
        whole(pool)


def test_a_thread_without_a_deadline_has_it_now_or_not_at_all() -> None:
    """As `allocate` answers; with one it waits."""
    with make_pool() as pool, Marks(pool) as marks:
        marked = marks.now(LIMIT)
        held = pool.allocate(LIMIT)
        with pytest.raises(OutOfMemoryError), marked:
            pass
        with pytest.raises(PoolTimeout), marked.use(timeout=0.01):
            pass
        held.free()
        with marked:
            pass


def test_a_blocking_use_on_a_loop_does_not_wait_for_that_loop() -> None:
    """The task that brings it home could never go on."""

    async def main() -> None:
        async with make_pool() as pool, Marks(pool) as marks:
            marked = await marks(LIMIT)
            held = await pool.allocate_async(LIMIT)

            async def work() -> None:
                async with marked:
                    pass

            task = asyncio.create_task(work())
            await until(lambda: pool.stats().waiting == 1)
            with pytest.raises(InvalidRequest, match="async with"), marked:
                pass
            held.free()
            await task

    run(main)
