"""The step loop runs one handle at a time, in repeatable orders, under virtual time, and never sleeps for ever."""

import asyncio
import itertools
import sys
import threading
from collections.abc import Callable

import anyio
import anyio.to_thread
import pytest

from asyncmem.testing import StepLoop, Stuck, run_steps


async def shuffled(log: list[int], tasks: int = 5) -> None:
    """Let several tasks append their number three times each."""

    async def work(number: int) -> None:
        for _ in range(3):
            log.append(number)
            await asyncio.sleep(0)

    await asyncio.gather(*(work(number) for number in range(tasks)))


def order(seed: int | None) -> list[int]:
    log: list[int] = []
    run_steps(shuffled(log), StepLoop(seed))
    return log


def test_order_without_seed_is_that_of_arrival() -> None:
    """With no seed, tasks take turns as on an ordinary loop."""
    assert order(None) == [0, 1, 2, 3, 4] * 3


def test_seed_picks_an_order_and_repeats_it() -> None:
    """The same seed gives the same order again, and seeds differ."""
    assert order(7) == order(7)
    assert len({tuple(order(seed)) for seed in range(10)}) > 5


def test_hook_comes_before_each_handle() -> None:
    """The hook sees every step by number, and what it schedules is not lost."""
    seen: list[int] = []
    run_steps(asyncio.sleep(0), StepLoop(hook=seen.append))
    assert seen == [1, 2, 3]


def test_a_wake_up_is_no_step() -> None:
    """How often others wake the loop is up to them, so it does not change which step is which."""

    async def woken(times: int) -> int:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, StepLoop)
        for _ in range(times):
            loop.call_soon_threadsafe(int)
            await asyncio.sleep(0)
        await asyncio.sleep(1)
        return loop.steps

    assert run_steps(woken(5)) - run_steps(woken(0)) == 10


def test_cancellation_from_the_hook_falls_between_steps() -> None:
    """A task cancelled by the hook gets its CancelledError at its next await."""
    loop = StepLoop()

    async def main() -> str:
        task = asyncio.current_task()
        assert task is not None
        loop.hook = lambda step: task.cancel() and None if step == 3 else None
        try:
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        except asyncio.CancelledError:
            return "cancelled"
        return "done"

    assert run_steps(main(), loop) == "cancelled"


def test_time_jumps_to_the_next_timer() -> None:
    """An hour of sleeping takes no time, and timers fire in order."""

    async def main() -> tuple[float, list[int]]:
        log: list[int] = []
        loop = asyncio.get_running_loop()
        for delay in (3, 1, 2):
            loop.call_later(delay, log.append, delay)
        await asyncio.sleep(3_000)
        return loop.time(), log

    assert run_steps(main()) == (3_000.0, [1, 2, 3])


def test_cancelled_timer_moves_no_time() -> None:
    """A timer that was cancelled is not waited for."""

    async def main() -> float:
        loop = asyncio.get_running_loop()
        loop.call_later(5, lambda: None).cancel()
        await asyncio.sleep(1)
        return loop.time()

    assert run_steps(main()) == 1.0


def test_wait_that_nobody_ends_is_stuck() -> None:
    """A lost wake-up raises at once and says who waits where."""

    async def forgotten() -> None:
        await asyncio.get_running_loop().create_future()

    with pytest.raises(Stuck, match=r"nothing is ready.*forgotten"):
        run_steps(forgotten())


def test_periodic_timer_does_not_hide_a_lost_wake_up() -> None:
    """A heartbeat alone is no progress."""

    async def main() -> None:
        loop = asyncio.get_running_loop()

        def beat() -> None:
            loop.call_later(60, beat)

        beat()
        await loop.create_future()

    with pytest.raises(Stuck, match="only timers fire"):
        run_steps(main())


def test_busy_loop_is_a_livelock() -> None:
    """A loop that never waits runs out of steps."""

    async def main() -> None:
        for _ in itertools.count():
            await asyncio.sleep(0)

    with pytest.raises(Stuck, match="livelock"):
        run_steps(main(), StepLoop(max_steps=100))


def test_outside_work_is_waited_for() -> None:
    """While another thread is at work the loop neither jumps nor gives up."""
    loop = StepLoop()

    async def main() -> tuple[str, float]:
        woken = loop.create_future()
        gate = threading.Event()

        def work() -> None:
            gate.wait(60)
            loop.call_soon_threadsafe(woken.set_result, "woken")

        thread = threading.Thread(target=work)
        thread.start()
        loop.call_later(1_000, woken.set_result, "timed out")
        with loop.external_work():
            gate.set()
            result = await woken
        thread.join()
        return result, loop.time()

    assert run_steps(main(), loop) == ("woken", 0.0)


def test_thread_pool_works_as_outside_work() -> None:
    """`anyio.to_thread` comes back to a step loop that was told of it."""
    loop = StepLoop()

    async def main() -> int:
        with loop.external_work():
            return await anyio.to_thread.run_sync(lambda: 42)

    assert run_steps(main(), loop) == 42


def test_idle_hook_makes_progress_before_time_does() -> None:
    """A simulated device can be advanced when the loop has nothing else to do."""
    waiting: list[asyncio.Future[str]] = []

    def advance() -> bool:
        if not waiting:
            return False
        waiting.pop().set_result("advanced")
        return True

    async def main() -> str:
        waiting.append(asyncio.get_running_loop().create_future())
        return await waiting[0]

    assert run_steps(main(), StepLoop(on_idle=advance)) == "advanced"


def test_failing_callback_fails_the_run() -> None:
    """An error that the loop would only log is raised at the end."""

    async def main() -> None:
        asyncio.get_running_loop().call_soon(divmod, 1, 0)
        await asyncio.sleep(0)

    with pytest.raises(BaseExceptionGroup, match="unhandled") as caught:
        run_steps(main())
    assert caught.group_contains(ZeroDivisionError)


@pytest.mark.parametrize("cancel", ["scope", "timeout"])
def test_time_limits_of_both_kinds_fire(cancel: str) -> None:
    """anyio's and asyncio's time limits run on virtual time."""

    async def by_scope() -> float:
        with anyio.move_on_after(20):
            await anyio.sleep_forever()
        return asyncio.get_running_loop().time()

    async def by_timeout() -> float:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(20):
                await anyio.sleep_forever()
        return asyncio.get_running_loop().time()

    limits: dict[str, Callable[[], object]] = {"scope": by_scope, "timeout": by_timeout}
    assert run_steps(limits[cancel]()) == 20.0  # type: ignore[arg-type]


def test_debug_mode_works() -> None:
    """asyncio's own debug checks may be on."""
    loop = StepLoop()
    loop.set_debug(True)
    log: list[int] = []
    run_steps(shuffled(log), loop)
    assert len(log) == 15


@pytest.mark.skipif(sys.version_info < (3, 12), reason="eager tasks came with 3.12")
def test_eager_tasks_work() -> None:
    """Tasks that run at their creation take part like others."""
    loop = StepLoop(3)
    loop.set_task_factory(asyncio.eager_task_factory)
    log: list[int] = []
    run_steps(shuffled(log), loop)
    assert len(log) == 15
