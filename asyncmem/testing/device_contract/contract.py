"""What every device promises: its clock, segments, copies, fences and streams, and its end."""

import asyncio
import gc
import itertools
import queue
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import pytest

from asyncmem.devices import Device, Fence, Host, Segment, Simulated, Stream
from asyncmem.errors import InvalidRequest, OutOfMemoryError

MIB = 1 << 20
SOON = 30.0  # seconds, for what needs nothing else to happen
MOMENT = 0.02  # seconds in which what would happen by itself happens, on most machines


@dataclass(frozen=True)
class Rig:
    """A device under test, and a way to keep its streams busy."""

    device: Device
    """Used by the test alone, with at least 32 MiB free."""
    occupy: Callable[[Stream], None]
    """Gives a stream work that ends with `release`, or after some tenths of a second where it cannot be ended."""
    release: Callable[[], None]
    """Lets all work end. It is called again when nothing is left to release."""

    def busy(self) -> Stream:
        """Return a new stream with work that has not ended."""
        stream = self.device.create_stream("busy")
        self.occupy(stream)
        return stream

    def busy_fence(self, behind: str) -> Fence:
        """Return a fence behind work that has not ended: of its "stream", or of "all"."""
        stream = self.busy()
        return stream.record() if behind == "stream" else self.device.record_all()


class Rigged:
    """Tests that are given a `rig` by the class that takes them over."""

    @pytest.fixture
    def device(self, rig: Rig) -> Device:
        """The device alone, for tests that keep no stream busy."""
        return rig.device

    @pytest.fixture
    def segment(self, device: Device) -> Iterator[Segment]:
        """A segment of a MiB, for work on the default stream."""
        made = device.allocate_segment(MIB)
        yield made
        device.default_stream.synchronize_blocking()
        device.free_segment(made)


def read(device: Device, address: int, nbytes: int = 1, stream: Stream | None = None) -> bytes:
    """Return bytes of the device, in the order of a stream."""
    back, stream = bytearray(nbytes), stream or device.default_stream
    device.copy_out(memoryview(back), address, stream)
    stream.synchronize_blocking()
    return bytes(back)


class Numbered:
    """A foreign library's stream, which offers its handle as CUDA streams do."""

    def __init__(self, version: int, handle: int) -> None:
        self._offer = (version, handle)

    def __cuda_stream__(self) -> tuple[int, int]:
        return self._offer


class DeviceContract(Rigged):
    """What every device promises. The class that takes it over has a fixture `rig`."""

    # -- the clock ----------------------------------------------------------------------------------------------

    def test_the_clock_goes_forward_until_what_is_waited_for_is_done(self, device: Device, segment: Segment) -> None:
        """Two readings around a piece of work are in order."""
        before = device.now
        device.fill(segment.address, MIB, 1, device.default_stream)
        device.default_stream.synchronize_blocking()
        assert device.now >= before

    # -- segments -----------------------------------------------------------------------------------------------

    def test_a_segments_size_is_rounded_up_to_the_granularity(self, device: Device) -> None:
        """A segment has at least the bytes asked for, in whole granules."""
        segment = device.allocate_segment(1)
        assert segment.nbytes == device.granularity
        assert segment.address % device.granularity == 0
        device.free_segment(segment)

    def test_auto_is_the_first_kind_and_direct_is_always_there(self, device: Device) -> None:
        """A pool may ask for "auto" or "direct" without knowing the device."""
        segments = [device.allocate_segment(MIB, kind) for kind in ("auto", "direct")]
        assert [segment.kind for segment in segments] == [device.segment_kinds[0], "direct"]
        for segment in segments:
            device.free_segment(segment)

    def test_segments_do_not_overlap(self, device: Device) -> None:
        """Two segments have no byte in common."""
        segments = sorted((device.allocate_segment(MIB) for _ in range(8)), key=lambda segment: segment.address)
        for low, high in itertools.pairwise(segments):
            assert low.address + low.nbytes <= high.address
        for segment in segments:
            device.free_segment(segment)

    def test_a_segment_goes_back_once(self, device: Device) -> None:
        """What is not out cannot be given back."""
        segment = device.allocate_segment(MIB)
        device.free_segment(segment)
        with pytest.raises(InvalidRequest, match="not given back yet"):
            device.free_segment(segment)

    def test_a_segment_stays_until_it_is_given_back(self, device: Device) -> None:
        """Dropping the record of a segment unmaps nothing: buffers may still lie there."""
        address = device.allocate_segment(MIB).address
        gc.collect()
        device.fill(address, MIB, 7, device.default_stream)
        assert read(device, address) == b"\x07"

    @pytest.mark.parametrize("nbytes", [0, -1])
    def test_refuses_sizes_that_are_not_positive(self, device: Device, nbytes: int) -> None:
        """A segment has bytes."""
        with pytest.raises(InvalidRequest, match="positive"):
            device.allocate_segment(nbytes)

    def test_refuses_a_kind_it_does_not_have(self, device: Device) -> None:
        """An unknown kind is named, with those there are."""
        with pytest.raises(InvalidRequest, match="imaginary"):
            device.allocate_segment(MIB, "imaginary")

    def test_too_much_is_out_of_memory_and_changes_nothing(self, device: Device) -> None:
        """After a refusal the device goes on as before."""
        with pytest.raises(OutOfMemoryError) as caught:
            device.allocate_segment(1 << 46)
        assert caught.value.asked == 1 << 46
        device.free_segment(device.allocate_segment(MIB))

    def test_memory_tells_what_is_free_of_how_much(self, device: Device) -> None:
        """Free memory is a part of the total."""
        info = device.memory()
        assert 0 < info.free <= info.total == device.capacity

    def test_driver_calls_are_counted(self, device: Device) -> None:
        """Getting a segment and giving it back are driver calls."""
        before = device.driver_calls
        device.free_segment(device.allocate_segment(MIB))
        assert device.driver_calls >= before + 2

    # -- copies -------------------------------------------------------------------------------------------------

    def test_bytes_come_back_as_they_went_in(self, device: Device) -> None:
        """Copies in, across and out keep each byte, in the order of the stream."""
        stream = device.create_stream()
        segment = device.allocate_segment(2 * MIB, stream=stream)
        data = bytes(range(256)) * 16
        device.copy_in(segment.address, memoryview(data), stream)
        device.copy(segment.address + MIB, segment.address, len(data), stream)
        assert read(device, segment.address + MIB, len(data), stream) == data
        device.free_segment(segment)

    def test_fill_sets_exactly_its_range(self, device: Device, segment: Segment) -> None:
        """The bytes before and behind stay."""
        device.fill(segment.address, 4, 1, device.default_stream)
        device.fill(segment.address + 1, 2, 9, device.default_stream)
        assert list(read(device, segment.address, 4)) == [1, 9, 9, 1]

    def test_waiting_orders_a_copy_behind_another_streams(self, device: Device) -> None:
        """What stream a wrote before its fence is there for stream b behind it."""
        a, b = device.create_stream("a"), device.create_stream("b")
        segment = device.allocate_segment(MIB, stream=a)
        device.fill(segment.address, MIB, 7, a)
        b.wait(a.record())
        assert read(device, segment.address, stream=b) == b"\x07"
        device.free_segment(segment)

    def test_refuses_host_memory_that_it_cannot_use(self, device: Device, segment: Segment) -> None:
        """A target must be writable, and both sides contiguous."""
        with pytest.raises(InvalidRequest, match="writable"):
            device.copy_out(memoryview(b"read only"), segment.address, device.default_stream)
        with pytest.raises(InvalidRequest, match="contiguous"):
            device.copy_in(segment.address, memoryview(b"every other")[::2], device.default_stream)

    # -- fences -------------------------------------------------------------------------------------------------

    def test_a_fence_of_an_idle_stream_is_reached(self, device: Device) -> None:
        """With nothing submitted there is nothing to wait for, but for the driver's own moment."""
        fence = device.create_stream().record()
        assert fence.block(SOON)
        assert fence.done()
        assert fence.block(0)

    def test_a_fence_is_reached_when_the_work_before_it_is_complete(self, rig: Rig) -> None:
        """Busy, then done, then done for ever."""
        fence = rig.busy().record()
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
        assert not rig.busy().record().block(MOMENT)

    def test_a_waiting_stream_is_behind_the_fence(self, rig: Rig) -> None:
        """Work behind a wait is done only after the fence; other streams do not mind."""
        waiting, other = rig.device.create_stream(), rig.device.create_stream()
        waiting.wait(rig.busy().record())
        behind = waiting.record()
        assert other.record().block(SOON)
        assert not behind.block(MOMENT)
        rig.release()
        assert behind.block(SOON)

    def test_a_wait_for_ones_own_fence_is_no_obstacle(self, rig: Rig) -> None:
        """A stream is behind its own work anyway."""
        busy = rig.busy()
        busy.wait(busy.record())
        rig.release()
        assert busy.record().block(SOON)

    def test_record_all_covers_every_stream(self, rig: Rig) -> None:
        """The context-wide fence waits for streams that were not named, forgotten ones too."""
        rig.busy()
        everything = rig.device.record_all()
        assert rig.device.default_stream.record().block(SOON)
        assert not everything.block(MOMENT)
        rig.release()
        assert everything.block(SOON)
        assert everything.done()

    # -- callbacks of fences ------------------------------------------------------------------------------------

    def test_a_reached_fence_calls_back_at_once(self, device: Device) -> None:
        """There is nothing to wait for, so the call comes on this thread."""
        calls: list[int] = []
        fence = device.create_stream().record()
        assert fence.block(SOON)
        fence.notify(lambda: calls.append(threading.get_ident()))
        assert calls == [threading.get_ident()]

    @pytest.mark.parametrize("behind", ["stream", "all"])
    def test_a_fence_calls_back_once_for_each_notify(self, rig: Rig, behind: str) -> None:
        """Not before the fence, then once, for each of several, in no promised order."""
        calls: queue.SimpleQueue[str] = queue.SimpleQueue()
        fence = rig.busy_fence(behind)
        for name in ("first", "second", "third"):
            fence.notify(partial(calls.put, name))
        assert calls.empty()
        rig.release()
        assert sorted(calls.get(timeout=SOON) for _ in range(3)) == ["first", "second", "third"]
        assert rig.device.default_stream.record().block(SOON)
        assert calls.empty()

    @pytest.mark.parametrize("behind", ["stream", "all"])
    def test_forgetting_drops_the_callback_and_what_it_holds(self, rig: Rig, behind: str) -> None:
        """A wait that was cancelled is not called and keeps nothing alive, however long the work runs."""
        called: list[int] = []
        kept = threading.Event()
        callback = partial(called.append, 1)
        alive = weakref.ref(callback)
        fence = rig.busy_fence(behind)
        fence.notify(callback)
        fence.notify(kept.set)
        fence.forget(callback)
        del callback
        assert alive() is None
        rig.release()
        assert kept.wait(SOON)
        assert called == []

    @pytest.mark.parametrize("behind", ["stream", "all"])
    def test_an_error_in_a_callback_is_shown_and_stops_nothing(
        self, rig: Rig, behind: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A mistake of one waiter harms neither the others nor the stream."""
        shown: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        monkeypatch.setattr(threading, "excepthook", lambda args: shown.put(args.exc_value))
        kept = threading.Event()
        fence = rig.busy_fence(behind)
        fence.notify(partial(divmod, 1, 0))
        fence.notify(kept.set)
        rig.release()
        assert kept.wait(SOON)
        assert isinstance(shown.get(timeout=SOON), ZeroDivisionError)
        assert rig.device.default_stream.record().block(SOON)

    def test_forgetting_what_is_not_there_is_fine(self, device: Device) -> None:
        """Forgetting after the call, or twice, does nothing."""
        fence, callback = device.create_stream().record(), threading.Event().set
        assert fence.block(SOON)
        fence.forget(callback)
        fence.notify(callback)
        fence.forget(callback)

    # -- awaiting fences ----------------------------------------------------------------------------------------

    def test_other_tasks_run_while_one_awaits_a_fence(self, rig: Rig) -> None:
        """What is awaited ends only by what another task does, so neither held up the loop."""
        stream = rig.device.create_stream()
        order: list[str] = []

        async def wait() -> None:
            rig.occupy(stream)
            fence = stream.record()
            order.append("waits")
            await fence
            assert fence.done()
            order.append("is done")

        async def let_go() -> None:
            order.append("goes on")
            rig.release()

        async def both() -> None:
            await asyncio.wait_for(asyncio.gather(wait(), let_go()), SOON)

        asyncio.run(both())
        assert order == ["waits", "goes on", "is done"]

    def test_a_wait_that_is_cancelled_leaves_the_work_alone(self, rig: Rig) -> None:
        """Nothing on the device changes, and the fence can be awaited again."""

        async def cancel_and_wait() -> None:
            fence = rig.busy().record()
            waiting = asyncio.ensure_future(_wait_for(fence))
            await asyncio.sleep(0)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            assert not fence.done()
            rig.release()
            await asyncio.wait_for(_wait_for(fence), SOON)

        asyncio.run(cancel_and_wait())

    # -- streams, by what means them ----------------------------------------------------------------------------

    def test_streams_are_found_by_what_means_them(self, device: Device) -> None:
        """None, a stream, its handle, and an object with `__cuda_stream__` all name one stream."""
        stream = device.create_stream()
        assert device.stream_of(None) is device.default_stream
        assert device.stream_of(0) is device.default_stream
        for source in (stream, stream.handle, Numbered(0, stream.handle)):
            assert device.stream_of(source) is stream

    @pytest.mark.parametrize("source", [True, 1.0, "stream-1", -1, Numbered(1, 0), Numbered(0, 999_999), object])
    def test_refuses_what_means_no_stream(self, device: Device, source: object) -> None:
        """What names no live stream of this device is a wrong argument."""
        with pytest.raises(InvalidRequest, match="stream"):
            device.stream_of(source)

    def test_refuses_another_devices_stream(self, device: Device) -> None:
        """A stream orders only its own device's memory."""
        for stranger in (Simulated(), Simulated() if isinstance(device, Host) else Host()):
            with pytest.raises(InvalidRequest, match=device.name):
                device.stream_of(stranger.default_stream)

    def test_streams_keep_the_name_they_were_given(self, device: Device) -> None:
        """Names show up in messages; a stream without one gets its own."""
        assert device.create_stream("decode").name == "decode"
        assert device.create_stream().name != device.create_stream().name

    def test_synchronize_blocking_waits_for_all_work(self, rig: Rig) -> None:
        """Once it returns, everything submitted before is complete."""
        busy = rig.busy()
        fence = busy.record()
        rig.release()
        busy.synchronize_blocking()
        assert fence.done()

    # -- closing ------------------------------------------------------------------------------------------------

    def test_closing_twice_is_fine_and_ends_all_threads(self, rig: Rig) -> None:
        """A closed device has no thread left, and its queued work was done."""
        before = set(threading.enumerate())
        stream = rig.device.create_stream()
        rig.occupy(stream)
        fence = stream.record()
        fence.notify(lambda: None)
        rig.release()
        rig.device.close()
        rig.device.close()
        assert fence.done()
        assert set(threading.enumerate()) <= before

    def test_closing_leaves_segments_valid(self, device: Device) -> None:
        """Buffers that are still held outlive the device's threads."""
        segment = device.allocate_segment(MIB)
        device.close()
        device.free_segment(segment)


async def _wait_for(fence: Fence) -> None:
    await fence
