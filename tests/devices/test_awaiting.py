"""Awaiting a fence on each loop: it ends when the fence is reached, and leaves nothing behind when it is cancelled."""

import asyncio
from collections.abc import Callable, Generator

import pytest
import trio
import trio.testing

from asyncmem.devices import Fence, Stream
from asyncmem.errors import InvalidRequest
from asyncmem.testing.device_contract import Rig


class ManualFence(Fence):
    """Reached when the test says so; shows what is registered with it."""

    def __init__(self) -> None:
        self.reached = False
        self.callbacks: list[Callable[[], None]] = []

    def done(self) -> bool:
        return self.reached

    def notify(self, callback: Callable[[], None]) -> None:
        self.callbacks.append(callback)

    def forget(self, callback: Callable[[], None]) -> None:
        if callback in self.callbacks:
            self.callbacks.remove(callback)

    def block(self, timeout: float | None = None) -> bool:
        raise NotImplementedError

    def fire(self) -> None:
        self.reached = True
        for callback in list(self.callbacks):
            callback()


async def wait_for(fence: ManualFence) -> None:
    await fence


@pytest.mark.asyncio
async def test_asyncio_waits_until_the_fence_is_reached(rig: Rig) -> None:
    """The task sleeps while the stream is busy, wakes from whichever thread, and other tasks run meanwhile."""
    stream = rig.device.create_stream()
    rig.occupy(stream)
    fence = stream.record()
    waiting = asyncio.ensure_future(asyncio.wait_for(_synchronize(stream), 60))
    await asyncio.sleep(0)
    assert not waiting.done()
    rig.release()
    await waiting
    assert fence.done()


@pytest.mark.anyio
async def test_trio_waits_until_the_fence_is_reached(rig: Rig) -> None:
    """The same on trio."""
    stream = rig.device.create_stream()
    rig.occupy(stream)
    fence = stream.record()
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_synchronize, stream)
            await trio.testing.wait_all_tasks_blocked()
            rig.release()
    assert fence.done()


async def _synchronize(stream: Stream) -> None:
    await stream.synchronize()


@pytest.mark.asyncio
async def test_asyncio_takes_no_iteration_for_a_reached_fence() -> None:
    """A fence that is done completes the await at once."""
    fence = ManualFence()
    fence.reached = True
    with pytest.raises(StopIteration):
        wait_for(fence).send(None)


@pytest.mark.asyncio
async def test_cancelling_on_asyncio_leaves_nothing_with_the_fence() -> None:
    """The callback goes with the waiter, and the fence does not know of the cancellation."""
    fence = ManualFence()
    task = asyncio.ensure_future(wait_for(fence))
    await asyncio.sleep(0)
    assert len(fence.callbacks) == 1
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert fence.callbacks == []


@pytest.mark.anyio
async def test_cancelling_on_trio_leaves_nothing_with_the_fence() -> None:
    """The same on trio."""
    fence = ManualFence()
    with trio.CancelScope() as scope:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(wait_for, fence)
            await trio.testing.wait_all_tasks_blocked()
            assert len(fence.callbacks) == 1
            scope.cancel()
    assert fence.callbacks == []


@pytest.mark.asyncio
async def test_a_wake_up_that_meets_a_cancellation_on_asyncio_harms_nobody() -> None:
    """The fence fires, then the task is cancelled before it runs: one outcome, no error in the loop."""
    fence = ManualFence()
    task = asyncio.ensure_future(wait_for(fence))
    await asyncio.sleep(0)
    task.cancel()
    fence.fire()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.anyio
async def test_a_wake_up_that_meets_a_cancellation_on_trio_harms_nobody() -> None:
    """The same on trio, in both orders of the two."""
    for cancel_first in (True, False):
        fence = ManualFence()
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(wait_for, fence)
                await trio.testing.wait_all_tasks_blocked()
                steps: list[Callable[[], None]] = [scope.cancel, fence.fire]
                for step in steps if cancel_first else reversed(steps):
                    step()
        assert fence.callbacks == []


def test_a_closed_asyncio_loop_does_not_trouble_the_notifying_thread() -> None:
    """The loop is gone with its waiters: the callback finds nobody and returns."""
    fence = ManualFence()

    async def begin() -> Generator[object, object, object]:
        generator = fence.__await__()
        generator.send(None)
        return generator

    loop = asyncio.new_event_loop()
    suspended = loop.run_until_complete(begin())
    loop.close()
    fence.fire()
    suspended.close()
    assert fence.callbacks == []


def test_a_finished_trio_run_does_not_trouble_the_notifying_thread() -> None:
    """A callback that was taken before the run ended may still be called after it."""
    fence = ManualFence()
    taken: list[Callable[[], None]] = []

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(wait_for, fence)
            await trio.testing.wait_all_tasks_blocked()
            taken.extend(fence.callbacks)
            nursery.cancel_scope.cancel()

    trio.run(main)
    for callback in taken:
        callback()


def test_awaiting_without_a_loop_says_what_to_do() -> None:
    """A coroutine that is driven by hand gets an error instead of a hang."""
    with pytest.raises(InvalidRequest, match=r"block\(\)"):
        wait_for(ManualFence()).send(None)


def test_trio_as_guest_of_asyncio_counts_as_trio() -> None:
    """Where both loops are running, the task's own framework is asked."""
    fence = ManualFence()
    outcome: list[object] = []

    async def trio_main() -> str:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(wait_for, fence)
            await trio.testing.wait_all_tasks_blocked()
            fence.fire()
        return "served"

    async def asyncio_main() -> None:
        loop = asyncio.get_running_loop()
        finished = loop.create_future()
        trio.lowlevel.start_guest_run(
            trio_main,
            run_sync_soon_threadsafe=loop.call_soon_threadsafe,
            done_callback=finished.set_result,
        )
        outcome.append((await finished).unwrap())

    asyncio.run(asyncio_main())
    assert outcome == ["served"]
