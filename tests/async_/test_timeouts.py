"""A deadline runs from the call, fires on time, and never both fires and grants."""

import asyncio
import threading

import anyio
import anyio.to_thread
import pytest

from asyncmem import AsyncMemoryPool, PoolTimeout
from asyncmem.core import Buffer
from asyncmem.testing import run_steps
from tests.conservation import whole

from .loops import Run
from .support import LIMIT, MIB, GatedDevice, make_pool, stepped_pool, turns


async def hold_for(pool: AsyncMemoryPool, seconds: float) -> None:
    async with pool.allocate_async(LIMIT):
        await anyio.sleep(seconds)


def test_timeout_names_what_was_asked_and_how_long(virtually: Run) -> None:
    """PoolTimeout is a TimeoutError with the facts, after exactly the time given, and nothing is left in the queue."""

    async def main() -> None:
        async with stepped_pool() as pool, pool.allocate_async(LIMIT):
            before = anyio.current_time()
            with pytest.raises(PoolTimeout) as caught:
                await pool.allocate_async(MIB, timeout=3)
            assert isinstance(caught.value, TimeoutError)
            assert (caught.value.asked, caught.value.timeout) == (MIB, 3)
            assert anyio.current_time() - before == pytest.approx(3)
            assert pool.stats().waiting == 0
            assert pool.stats().timeouts == 1

    virtually(main)


@pytest.mark.parametrize("call", ["allocate_async", "allocate_batch", "lease", "empty"])
def test_timeout_may_be_text(virtually: Run, call: str) -> None:
    """Whatever waits reads "500 ms" as the pool's option does, and the error has the seconds."""

    async def main() -> None:
        async with stepped_pool() as pool, pool.allocate_async(LIMIT):
            asks = {
                "allocate_async": lambda: pool.allocate_async(MIB, timeout="500 ms"),
                "allocate_batch": lambda: pool.allocate_batch([MIB], timeout="500 ms"),
                "lease": lambda: pool.lease(MIB, timeout="500 ms").__aenter__(),
                "empty": lambda: pool.empty(MIB, timeout="500 ms"),
            }
            with pytest.raises(PoolTimeout, match="within 500 ms") as caught:
                await asks[call]()
            assert caught.value.timeout == 0.5
            assert pool.stats().waiting == 0

    virtually(main)


def test_timeout_of_a_thread_may_be_text() -> None:
    """A thread that blocks has its error, too."""
    with make_pool() as pool, pool.allocate(LIMIT), pytest.raises(PoolTimeout, match="within 20 ms"):
        pool.allocate(MIB, timeout="20 ms")


def test_deadline_runs_from_the_call(virtually: Run) -> None:
    """Time that passes before the await counts: an await after the deadline raises at once."""

    async def main() -> None:
        async with stepped_pool() as pool, pool.allocate_async(LIMIT):
            request = pool.allocate_async(MIB, timeout=3)
            await anyio.sleep(2)
            before = anyio.current_time()
            with pytest.raises(PoolTimeout):
                await request
            assert anyio.current_time() - before == pytest.approx(1)
            late = pool.allocate_async(MIB, timeout=3)
            await anyio.sleep(10)
            before = anyio.current_time()
            with pytest.raises(PoolTimeout):
                await late
            assert anyio.current_time() == before

    virtually(main)


@pytest.mark.hazard("H10")
def test_overdue_request_is_passed_over(virtually: Run) -> None:
    """Memory freed after a deadline goes to the next one, though nobody has awaited the overdue request yet."""

    async def main() -> None:
        async with stepped_pool() as pool:
            held = await pool.allocate_async(LIMIT)
            late = pool.allocate_async(LIMIT, timeout=1)
            following = pool.allocate_async(LIMIT)
            await anyio.sleep(2)
            held.free()
            assert following.done()
            following.result().free()
            with pytest.raises(PoolTimeout):
                await late
            whole(pool)

    virtually(main)


@pytest.mark.hazard("H10")
@pytest.mark.parametrize("order", ["holder first", "waiter first"])
def test_grant_and_timeout_in_one_tick_have_one_outcome(virtually: Run, order: str) -> None:
    """When the holder frees at the very moment of the deadline, the waiter gets a buffer or the error, not both."""

    async def main() -> None:
        async with stepped_pool() as pool:
            outcomes: list[str] = []

            async def wait() -> None:
                try:
                    async with pool.allocate_async(LIMIT, timeout=5) as buffer:
                        assert isinstance(buffer, Buffer)
                        outcomes.append("granted")
                except PoolTimeout:
                    outcomes.append("timed out")

            held = await pool.allocate_async(LIMIT)

            async def release() -> None:
                await anyio.sleep(5)
                held.free()

            async with anyio.create_task_group() as group:
                for play in (release, wait) if order == "holder first" else (wait, release):
                    group.start_soon(play)
                    await turns()
            assert len(outcomes) == 1
            stats = pool.stats()
            assert stats.timeouts == outcomes.count("timed out")
            whole(pool)

    virtually(main)


def test_default_timeout_of_the_pool_applies(virtually: Run) -> None:
    """A request without a timeout of its own has the pool's."""

    async def main() -> None:
        async with stepped_pool(timeout=2) as pool, pool.allocate_async(LIMIT):
            with pytest.raises(PoolTimeout) as caught:
                await pool.allocate_async(MIB)
            assert caught.value.timeout == 2

    virtually(main)


def test_zero_timeout_never_waits(virtually: Run) -> None:
    """timeout=0 returns at once, with a buffer or with the error."""

    async def main() -> None:
        async with stepped_pool() as pool:
            with pytest.raises(PoolTimeout):
                await pool.allocate_async(LIMIT, timeout=0)  # growing takes time
            await pool.warmup([(LIMIT, 1)])
            async with pool.allocate_async(LIMIT, timeout=0):
                before = anyio.current_time()
                with pytest.raises(PoolTimeout):
                    await pool.allocate_async(MIB, timeout=0)
                assert anyio.current_time() == before
            whole(pool)

    virtually(main)


@pytest.mark.may_block
def test_deadlines_are_undone_from_whichever_thread(everywhere: Run) -> None:
    """Requests with deadlines that the worker serves, or another thread by a free, harm neither loop nor thread."""

    async def main() -> None:
        device = GatedDevice()
        async with make_pool(device=device) as pool:

            async def ask() -> None:
                buffer = await pool.allocate_async(LIMIT, timeout=60)
                await anyio.to_thread.run_sync(buffer.free)

            async with anyio.create_task_group() as group:
                group.start_soon(ask)
                await anyio.to_thread.run_sync(device.entered.wait, 30)
                for _ in range(5):
                    group.start_soon(ask)
                device.gate.set()
            with pytest.raises(PoolTimeout):
                async with pool.allocate_async(LIMIT):
                    await pool.allocate_async(MIB, timeout=0.02)
            assert pool._opened.worker.alive
            whole(pool)

    everywhere(main)


def test_timers_are_gone_once_requests_are_served() -> None:
    """A request that is served, or cancelled, leaves no timer behind in the loop."""

    async def main() -> None:
        async with stepped_pool() as pool:
            task = asyncio.create_task(hold_for(pool, 1))
            await turns(2)
            (await pool.allocate_async(MIB, timeout=1_000)).free()
            await task
            assert asyncio.get_running_loop().time() < 10
            timers = asyncio.get_running_loop()._scheduled  # type: ignore[attr-defined]  # of BaseEventLoop
            assert all(timer.cancelled() for timer in timers)

    run_steps(main())


@pytest.mark.asyncio
async def test_the_loop_helps_a_thread_that_has_much_to_carry_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread beside a busy loop hardly gets the interpreter's lock: alone it took half a minute for 100,000 ends."""
    async with AsyncMemoryPool("host", limit=MIB) as pool, pool.allocate_async(MIB):
        core, worker, busy, over = pool._opened.core, pool._opened.worker, threading.Event(), threading.Event()
        worker.submit(lambda: busy.set() or over.wait(60))  # else it may be the one that goes on
        await anyio.to_thread.run_sync(busy.wait, 30)
        requests = [pool.allocate_async(512, timeout=3600) for _ in range(1000)]
        loop, posted = core.loop, []
        monkeypatch.setattr(type(loop), "soon", lambda _, call: posted.append(call) or True)

        def end_all() -> None:
            core.scheduler.expire(core.time + 4000)
            core.carry_out()

        thread = threading.Thread(target=end_all)
        thread.start()
        thread.join()
        over.set()
        assert [getattr(call, "__name__", "") for call in posted].count("carry_out") == 1
        assert pool.stats().timeouts == len(requests)  # and the thread goes on, because the loop may be held up
        for request in requests:
            assert isinstance(request.exception(), PoolTimeout)
