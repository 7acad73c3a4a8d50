"""Fences: polled, blocked on, waited for by streams, called back from and awaited."""

import asyncio
import queue
import threading
import weakref
from functools import partial

import pytest

from asyncmem.devices import Device, Fence
from asyncmem.testing.device_contract.rig import MOMENT, SOON, Rig, Rigged


class FencesContract(Rigged):
    """A fence is a point in a stream."""

    def test_a_fence_of_an_idle_stream_is_reached(self, device: Device) -> None:
        """With nothing submitted there is nothing to wait for, but for the driver's own moment."""
        fence = device.create_stream().record()
        assert fence.block(SOON)
        assert fence.done()
        assert fence.block(0)

    def test_a_fence_is_reached_when_the_work_before_it_is_complete(self, rig: Rig) -> None:
        """Busy, then done, then done for ever."""
        stream = rig.device.create_stream()
        rig.occupy(stream)
        fence = stream.record()
        assert not fence.block(MOMENT)
        rig.release()
        assert fence.block(SOON)
        assert fence.done()
        assert fence.done()

    def test_a_fence_does_not_cover_later_work(self, rig: Rig) -> None:
        """A fence is a point: what is submitted behind it does not move it."""
        stream = rig.device.create_stream()
        fence = stream.record()
        rig.occupy(stream)
        behind = stream.record()
        assert fence.block(SOON)
        assert not behind.block(MOMENT)

    def test_blocking_gives_up_after_its_timeout(self, rig: Rig) -> None:
        """False means that the time has passed and the fence is not reached."""
        stream = rig.device.create_stream()
        rig.occupy(stream)
        assert not stream.record().block(MOMENT)

    def test_a_waiting_stream_is_behind_the_fence(self, rig: Rig) -> None:
        """Work behind a wait is done only after the fence; other streams do not mind."""
        a, b, other = (rig.device.create_stream() for _ in range(3))
        rig.occupy(a)
        b.wait(a.record())
        behind = b.record()
        assert other.record().block(SOON)
        assert not behind.block(MOMENT)
        rig.release()
        assert behind.block(SOON)

    def test_a_wait_for_ones_own_fence_is_no_obstacle(self, rig: Rig) -> None:
        """A stream is behind its own work anyway."""
        stream = rig.device.create_stream()
        rig.occupy(stream)
        stream.wait(stream.record())
        rig.release()
        assert stream.record().block(SOON)

    def test_record_all_covers_every_stream(self, rig: Rig) -> None:
        """The context-wide fence waits for streams that nobody named, forgotten ones too."""
        busy = rig.device.create_stream()
        rig.occupy(busy)
        del busy
        everything = rig.device.record_all()
        assert rig.device.default_stream.record().block(SOON)
        assert not everything.block(MOMENT)
        rig.release()
        assert everything.block(SOON)
        assert everything.done()


class NoticesContract(Rigged):
    """Who waits for a fence is called back."""

    @pytest.fixture(params=["stream", "all"])
    def busy_fence(self, rig: Rig, request: pytest.FixtureRequest) -> Fence:
        """A fence behind work that has not ended."""
        stream = rig.device.create_stream("busy")
        rig.occupy(stream)
        return stream.record() if request.param == "stream" else rig.device.record_all()

    def test_a_reached_fence_calls_back_at_once(self, device: Device) -> None:
        """There is nothing to wait for, so the call comes on this thread."""
        calls: list[int] = []
        fence = device.create_stream().record()
        assert fence.block(SOON)
        fence.notify(lambda: calls.append(threading.get_ident()))
        assert calls == [threading.get_ident()]

    def test_a_fence_calls_back_once_for_each_notify(self, rig: Rig, busy_fence: Fence) -> None:
        """Not before the fence, then once, for each of several, in no promised order."""
        calls: queue.SimpleQueue[str] = queue.SimpleQueue()
        for name in ("first", "second", "third"):
            busy_fence.notify(partial(calls.put, name))
        assert calls.empty()
        rig.release()
        assert sorted(calls.get(timeout=SOON) for _ in range(3)) == ["first", "second", "third"]
        assert rig.device.default_stream.record().block(SOON)
        assert calls.empty()

    def test_forgetting_drops_the_callback_and_what_it_holds(self, rig: Rig, busy_fence: Fence) -> None:
        """A wait that was cancelled is not called and keeps nothing alive, however long the work runs."""
        called: list[None] = []
        kept = threading.Event()

        def callback() -> None:
            called.append(None)

        alive = weakref.ref(callback)
        busy_fence.notify(callback)
        busy_fence.notify(kept.set)
        busy_fence.forget(callback)
        del callback
        assert alive() is None
        rig.release()
        assert kept.wait(SOON)
        assert called == []

    def test_an_error_in_a_callback_is_shown_and_stops_nothing(
        self, rig: Rig, busy_fence: Fence, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A mistake of one who waits harms neither the others nor the stream."""
        shown: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        monkeypatch.setattr(threading, "excepthook", lambda args: shown.put(args.exc_value))
        kept = threading.Event()

        def mistake() -> None:
            raise ZeroDivisionError

        busy_fence.notify(mistake)
        busy_fence.notify(kept.set)
        rig.release()
        assert kept.wait(SOON)
        assert isinstance(shown.get(timeout=SOON), ZeroDivisionError)
        assert rig.device.default_stream.record().block(SOON)

    def test_forgetting_what_is_not_there_is_fine(self, device: Device) -> None:
        """Forgetting after the call, or twice, does nothing."""
        fence = device.create_stream().record()
        assert fence.block(SOON)

        def callback() -> None:
            pass

        fence.forget(callback)
        fence.notify(callback)
        fence.forget(callback)


class AwaitingContract(Rigged):
    """A task waits, and its loop does not."""

    def test_other_tasks_run_while_one_awaits_a_fence(self, rig: Rig) -> None:
        """What is awaited ends only by what another task does, so neither held up the loop."""
        stream = rig.device.create_stream()
        order: list[str] = []

        async def wait(begun: asyncio.Event) -> None:
            rig.occupy(stream)
            fence = stream.record()
            order.append("waits")
            begun.set()
            await fence
            assert fence.done()
            order.append("is done")

        async def let_go(begun: asyncio.Event) -> None:
            await begun.wait()
            order.append("goes on")
            rig.release()

        async def both() -> None:
            begun = asyncio.Event()
            await asyncio.wait_for(asyncio.gather(wait(begun), let_go(begun)), SOON)

        asyncio.run(both())
        assert order == ["waits", "goes on", "is done"]

    def test_a_wait_that_is_cancelled_leaves_the_work_alone(self, rig: Rig) -> None:
        """Nothing on the device changes, and the fence can be awaited again."""
        stream = rig.device.create_stream()

        async def cancel_and_wait() -> None:
            rig.occupy(stream)
            fence = stream.record()
            waiting = asyncio.ensure_future(_wait_for(fence))
            await asyncio.sleep(0)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            assert not fence.done()
            rig.release()
            await asyncio.wait_for(_wait_for(fence), SOON)

        asyncio.run(cancel_and_wait())


async def _wait_for(fence: Fence) -> None:
    await fence
