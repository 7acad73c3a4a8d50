"""The worker makes the calls that block, never in anybody's context, and is never missed in silence."""

import contextvars
import gc
import threading
import time
import weakref
from collections.abc import Callable

import anyio
import anyio.to_thread
import pytest

from asyncmem import AsyncMemoryPool, PoolClosed
from asyncmem.devices import Latencies, Simulated
from asyncmem.pool.worker import Worker
from tests.conservation import refillable, whole

from .loops import Run
from .support import LIMIT, MIB, make_pool, quick_device, stepped_pool, turns

BLOCKING = {"allocate_segment", "free_segment", "memory", "block", "close"}


def callers(device: Simulated) -> set[int]:
    """The threads that made calls which block."""
    return {call.thread for call in device.calls if call.name in BLOCKING}


@pytest.mark.hazard("H17")
def test_no_driver_call_that_blocks_is_made_on_the_loop(everywhere: Run) -> None:
    """Growing, trimming, resizing and closing call the driver from the worker only."""

    async def main() -> None:
        device = quick_device()
        async with make_pool(device=device, segment_size=2 * MIB, pregrow=2 * MIB) as pool:
            await pool.wait()
            for mib in (2, 4, 6, 8):
                async with pool.allocate_async(mib * MIB):
                    pass
            async with anyio.create_task_group() as group:
                for mib in (3, 5, 7):
                    group.start_soon(use, pool, mib)
            await pool.trim()
            await pool.warmup([(MIB, 4)])
            pool.resize(limit=4 * MIB)
        assert callers(device)
        assert threading.get_ident() not in callers(device)
        assert pool.stats().loop_blocking_calls == 0

    async def use(pool: AsyncMemoryPool, mib: int) -> None:
        async with pool.allocate_async(mib * MIB):
            await turns(2)

    everywhere(main)


def test_library_that_cannot_give_back_is_not_asked_again(everywhere: Run) -> None:
    """While a request waits, libraries are asked for what they keep; one that fails is not again. The pool goes on."""
    asked = threading.Event()

    def fail() -> None:
        asked.set()
        raise RuntimeError("the card is lost")

    async def main() -> None:
        async with make_pool() as pool:
            pool._opened.give_back_hooks.add(fail)
            held = await pool.allocate_async(LIMIT)
            async with anyio.create_task_group() as group:
                group.start_soon(use, pool)
                await anyio.to_thread.run_sync(asked.wait)
                held.free()
        assert pool._opened.give_back_hooks == set()

    async def use(pool: AsyncMemoryPool) -> None:
        async with pool.allocate_async(LIMIT):
            pass

    with pytest.warns(RuntimeWarning, match="asked for nothing more after RuntimeError.'the card is lost'"):
        everywhere(main)


@pytest.mark.hazard("H17")
@pytest.mark.may_block
def test_synchronous_growth_on_the_loop_is_counted(everywhere: Run) -> None:
    """allocate() on a loop's thread grows in place, and says so in the statistics."""

    async def main() -> int:
        async with make_pool() as pool:
            pool.allocate(MIB).free()
            return pool.stats().loop_blocking_calls

    assert everywhere(main) >= 1


@pytest.mark.hazard("H13")
@pytest.mark.may_block
def test_waiters_hear_when_the_worker_dies(everywhere: Run) -> None:
    """An error nobody expected ends the worker: the waiters get it, the pool closes, and what is held stays valid."""

    async def main() -> None:
        device = quick_device()
        pool = make_pool(device=device, segment_size=2 * MIB)
        held = await pool.allocate_async(2 * MIB)
        with pytest.warns(RuntimeWarning, match="a bug in the driver"):
            await refused(pool, device)
        assert held.alive
        held.free()
        await pool.aclose()
        whole(pool)

    async def refused(pool: AsyncMemoryPool, device: Simulated) -> None:
        device.fail("allocate_segment", times=100, error=ZeroDivisionError("a bug in the driver"))
        for _ in range(2):
            with pytest.raises(PoolClosed, match="a bug in the driver"):
                await pool.allocate_async(4 * MIB)

    everywhere(main)


@pytest.mark.hazard("H22")
def test_pool_keeps_nobodys_context(everywhere: Run) -> None:
    """What the first user of a pool had in its context variables is not kept alive by the pool."""
    variable: contextvars.ContextVar[object] = contextvars.ContextVar("variable")

    class Luggage:
        pass

    async def main() -> None:
        async with make_pool(segment_size=2 * MIB) as pool:
            dead = await first_use(pool)
            await turns(5)
            await anyio.to_thread.run_sync(pool._opened.run(lambda: None).block, 60)  # the worker is past its last job
            gc.collect()
            assert dead() is None

    async def first_use(pool: AsyncMemoryPool) -> Callable[[], object]:
        luggage = Luggage()

        async def carry() -> None:
            variable.set(luggage)
            held = [await pool.allocate_async(4 * MIB), await pool.allocate_async(4 * MIB)]
            with anyio.move_on_after(0):
                await pool.allocate_async(MIB)
            held.clear()

        async with anyio.create_task_group() as group:
            group.start_soon(carry)
        return weakref.ref(luggage)

    everywhere(main)


@pytest.mark.hazard("H22")
@pytest.mark.may_block
def test_pool_may_be_opened_and_closed_in_different_tasks(everywhere: Run) -> None:
    """No scope is held open between open and aclose, so neither task's cancellation touches the worker."""

    async def main() -> None:
        pool = make_pool()
        async with anyio.create_task_group() as group:
            group.start_soon(pool.open)
        with anyio.CancelScope() as scope:
            (await pool.allocate_async(MIB)).free()
            scope.cancel()
        await refillable(pool, LIMIT)
        async with anyio.create_task_group() as group:
            group.start_soon(pool.aclose)

    everywhere(main)


@pytest.mark.hazard("H22")
def test_closed_pool_leaves_no_thread_behind(everywhere: Run) -> None:
    """After aclose the worker's thread has ended."""
    before = set(threading.enumerate())

    async def main() -> None:
        async with make_pool() as pool:
            (await pool.allocate_async(MIB)).free()
            assert set(threading.enumerate()) - before

    everywhere(main)
    for thread in set(threading.enumerate()) - before:
        thread.join(60)
        assert not thread.is_alive()


class LockedDevice(Simulated):
    """A device whose driver takes a lock of its own for each call, and holds it while it calls back."""

    def __init__(self) -> None:
        super().__init__(latencies=Latencies.zero(), autojump=True)
        self.driver_lock = threading.Lock()
        self.re_entered: list[str] = []
        log_enter = self.log.enter

        def enter(name: str, nbytes: int = 0, *, cost: str = "") -> None:
            if self.calling_back == threading.get_ident():
                self.re_entered.append(name)
            log_enter(name, nbytes, cost=cost)

        self.calling_back: int | None = None
        self.log.enter = enter  # type: ignore[method-assign]  # watched here

    def advance(self, seconds: float) -> None:
        self.calling_back = threading.get_ident()
        try:
            super().advance(seconds)
        finally:
            self.calling_back = None


@pytest.mark.hazard("H16")
@pytest.mark.may_block
def test_pool_never_calls_the_driver_from_within_a_callback_of_its() -> None:
    """Fences that complete while the driver is busy calling back lead to no driver call on that thread."""

    async def main() -> None:
        device = LockedDevice()
        async with make_pool(device=device) as pool:
            one, two = device.create_stream("one"), device.create_stream("two")
            for _ in range(5):
                buffer = await pool.allocate_async(LIMIT, stream=one)
                one.launch(1.0, writes=[buffer])
                buffer.free()
                request = pool.allocate_async(LIMIT, stream=two)
                device.advance(2.0)
                (await request).free()
                await pool.trim()
            assert device.re_entered == []
            whole(pool)

    anyio.run(main)


def test_jobs_without_end_do_not_keep_the_worker_from_looking_after_its_pool() -> None:
    """It ticks between them, once that is due."""
    ticked = threading.Event()

    def tick() -> float:
        ticked.set()
        return 60.0

    def job() -> None:
        if not ticked.is_set():
            worker.submit(job)

    worker = Worker("busy", tick, lambda _: None)
    worker.start()
    worker.submit(job)
    assert ticked.wait(60)
    assert worker.close(60)


def test_worker_that_is_needed_no_longer_does_what_it_was_given_before() -> None:
    """Its pool may be over by then, and somebody waits for the last job all the same."""
    begun, gate, last = threading.Event(), threading.Event(), threading.Event()

    def job() -> None:
        begun.set()
        gate.wait(60)
        time.sleep(0.02)  # so that a look is due when it ends

    worker = Worker("over", lambda: None, lambda _: None)
    worker.start()
    worker.submit(job)
    assert begun.wait(60)
    worker.submit(last.set)
    gate.set()
    assert last.wait(60)
    assert worker.close(60)


def test_pages_are_looked_after_for_as_long_as_memory_is_freed() -> None:
    """And segments never; once nothing happens any more, the caches are emptied and the worker sleeps."""
    with stepped_pool() as pool:
        pool.allocate(MIB).free()
        assert pool._opened.beat() is None
    device = quick_device()
    with stepped_pool(device=device, segments="paged") as pool:
        for _ in range(3):
            pool.allocate(1000).free()
            assert pool._opened.beat() is not None
        device.run_until_idle()
        pool._opened.retire.poll()
        beats = 0
        while pool._opened.beat() is not None:  # a program that pauses may go on at any moment
            beats += 1
            assert pool._opened.core.counts().cached == 0
        assert 10 < beats < 1000


def test_pages_are_looked_after_more_often_near_a_limit() -> None:
    """There somebody is about to wait for what is done."""
    with stepped_pool(device=quick_device(), segments="paged", limit="64 MiB") as pool:
        held = pool.allocate("63.5 MiB")
        pauses = []
        for _ in range(2):
            pool.allocate(1000).free()
            pauses.append(pool._opened.beat())
            held.free()
            pool.empty_cache()
        often, seldom = pauses
        assert often is not None
        assert seldom is not None
        assert often < seldom
