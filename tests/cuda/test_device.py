"""The CUDA device: memory in its three ways, streams of everybody, fences, errors and its end."""

import ctypes
import gc
import sys
import threading
import time
from collections.abc import Callable
from unittest import mock

import numpy as np
import pytest

from asyncmem import AsyncMemoryPool
from asyncmem.devices import Cuda, Device, Host, Simulated, Stream, device
from asyncmem.devices.gpu.device import Gpu
from asyncmem.devices.host_memory import bytes_at
from asyncmem.devices.memory_checker import Sanitizer
from asyncmem.errors import BackendUnavailable, DeviceError, InvalidRequest, OutOfMemoryError

from .fake import FakeDriver
from .vendors import Kinds

MIB = 1 << 20
KINDS = ["stream_ordered", "direct"]

MAPPING_SUPPORTED, POOLS_SUPPORTED = 102, 115


def write_and_read(gpu: Gpu, address: int, nbytes: int) -> None:
    """See that both ends of a range hold what is written there."""
    stream = gpu.create_stream()
    stream.wait(gpu.default_stream.record())
    data, back = b"\x5a\xa5", bytearray(4)
    gpu.copy_in(address, memoryview(data), stream)
    gpu.copy(address + nbytes - 2, address, 2, stream)
    gpu.copy_out(memoryview(back)[:2], address, stream)
    gpu.copy_out(memoryview(back)[2:], address + nbytes - 2, stream)
    stream.synchronize_blocking()
    assert bytes(back) == data * 2


class TestOpening:
    def test_is_found_by_its_name(self, driver: FakeDriver | None) -> None:
        """A number names a card, and "auto" takes the first one where there is one."""
        del driver
        for name in ("cuda", "cuda:0", "auto"):
            made = device(name)
            assert isinstance(made, Cuda)
            assert (made.name, made.kind, made.dlpack_device) == ("cuda:0", "cuda", (2, 0))
            made.close()

    def test_a_number_that_no_card_has_is_unavailable(self, driver: FakeDriver | None) -> None:
        """The error says how many there are."""
        del driver
        with pytest.raises(BackendUnavailable, match="it shows only cuda:0") as caught:
            Cuda(99)
        assert caught.value.device == "cuda:99"
        assert "host" in caught.value.install
        with pytest.raises(InvalidRequest, match="index"):
            Cuda(-1)

    @pytest.mark.fake_only
    def test_hidden_cards_are_named_as_the_reason(self, fake: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
        """A variable that was forgotten somewhere costs nobody an hour."""
        fake.devices(0)
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
        with pytest.raises(BackendUnavailable, match="CUDA_VISIBLE_DEVICES is ''"):
            Cuda()
        assert isinstance(device("auto"), Host)

    @pytest.mark.parametrize("name", ["cuda:0", "gpu", "auto"])
    def test_without_the_bindings_it_is_said_what_to_install(
        self, driver: FakeDriver | None, monkeypatch: pytest.MonkeyPatch, name: str
    ) -> None:
        """They are an extra, so this is what many hear first; "auto" does not pass over a GPU that is there."""
        del driver
        monkeypatch.setitem(sys.modules, "cuda.bindings", None)
        with pytest.raises(BackendUnavailable, match=r"GPU is there: pip install 'asyncmem\[cuda\]'") as caught:
            device(name)
        assert caught.value.package == "cuda-python"

    @pytest.mark.fake_only
    def test_an_old_driver_is_unavailable(self, fake: FakeDriver) -> None:
        """What it is and what is needed are both said."""
        fake.version(12_030)
        with pytest.raises(BackendUnavailable, match=r"CUDA 12\.3.*CUDA 12\.4"):
            Cuda()

    @pytest.mark.fake_only
    @pytest.mark.parametrize(
        ("code", "error"), [(100, BackendUnavailable), (803, BackendUnavailable), (999, DeviceError)]
    )
    def test_a_driver_that_cannot_start_says_why(self, fake: FakeDriver, code: int, error: type[Exception]) -> None:
        """A machine without a card is one thing, a driver that fails another; "auto" takes the host for both."""
        fake.fail("cuInit", 1, code)
        with pytest.raises(error, match="cuInit"):
            Cuda()
        fake.fail("cuInit", 1, code)
        assert isinstance(device("auto"), Host)

    @pytest.mark.fake_only
    def test_a_device_that_is_lost_is_an_error_at_once(self, fake: FakeDriver) -> None:
        """The call, the code and its name are there, and what to do."""
        before = Cuda()
        fake.lose(0, 700)
        with pytest.raises(DeviceError, match="compute-sanitizer") as caught:
            Cuda()
        assert (caught.value.code, caught.value.code_name) == (700, "CUDA_ERROR_ILLEGAL_ADDRESS")
        assert caught.value.call
        before.close()
        fake.reset()

    def test_segments_of_a_kind_that_it_has_not_are_refused(self, driver: FakeDriver | None) -> None:
        """The kinds there are stand in the error."""
        del driver
        with pytest.raises(InvalidRequest, match="stream_ordered"):
            Cuda(segments="imaginary")

    @pytest.mark.fake_only
    def test_auto_takes_what_the_device_has(self, fake: FakeDriver) -> None:
        """Pages where memory can be mapped, else the driver's pools, else plain memory, which is always there."""
        found = []
        for missing in (None, MAPPING_SUPPORTED, POOLS_SUPPORTED):
            if missing is not None:
                fake.attribute(0, missing, 0)
            gpu = Cuda()
            found.append((gpu.prefers_pages, *gpu.segment_kinds))
            segment = gpu.allocate_segment(1)
            gpu.default_stream.synchronize_blocking()
            gpu.free_segment(segment)
            gpu.close()
        assert found == [(True, "stream_ordered", "direct"), (False, "stream_ordered", "direct"), (False, "direct")]

    def test_what_was_chosen_comes_first(self, driver: FakeDriver | None) -> None:
        """So "auto" of a pool means it."""
        del driver
        gpu = Cuda(segments="direct")
        segment = gpu.allocate_segment(1)
        assert (segment.kind, gpu.segment_kinds[0], set(gpu.segment_kinds)) == ("direct", "direct", set(KINDS))
        gpu.free_segment(segment)
        gpu.close()

    @pytest.mark.parametrize(
        ("of_the_device", "of_the_pool", "kind"),
        [
            ("auto", "auto", "paged"),
            ("auto", "stream_ordered", "stream_ordered"),
            ("stream_ordered", "auto", "stream_ordered"),
            ("stream_ordered", "paged", "paged"),
        ],
    )
    def test_pools_hold_pages_where_no_kind_is_named(
        self, driver: FakeDriver | None, of_the_device: str, of_the_pool: str, kind: str
    ) -> None:
        """What the pool's options name comes first, then what the device was opened for."""
        del driver
        gpu = Cuda(segments=of_the_device)
        with AsyncMemoryPool(gpu, segments=of_the_pool) as pool, pool.allocate(1):
            assert {segment.kind for segment in pool.segments()} == {kind}
        gpu.close()

    def test_pools_hold_segments_under_a_memory_checker(
        self, driver: FakeDriver | None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It is told of whole segments only."""
        del driver
        monkeypatch.setattr(
            "asyncmem.devices.gpu.device.attached_checker", lambda: mock.create_autospec(Sanitizer, instance=True)
        )
        gpu = Cuda()
        with AsyncMemoryPool(gpu) as pool, pool.allocate(1):
            assert {segment.kind for segment in pool.segments()} == {"stream_ordered"}
        assert not gpu.joins_segments
        gpu.close()

    @pytest.mark.fake_only
    @pytest.mark.parametrize("kind", KINDS)
    def test_neither_waits_for_anothers_work_nor_gets_before_it(self, fake: FakeDriver, gpu: Gpu, kind: str) -> None:
        """Other libraries are at work on the default stream: the segment that is made for a try is beside them."""
        with gpu.context.entered():
            fake.hold(gpu.default_stream.handle)
            fake.launch(gpu.default_stream.handle)
        type(gpu)(0, segments=kind).close()
        assert fake.violations() == []


@pytest.mark.every_vendor
class TestSegments:
    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("nbytes", [1, 2 * MIB, 70 * MIB, 300 * MIB])
    def test_hold_bytes_from_end_to_end(self, gpu: Gpu, kind: str, nbytes: int) -> None:
        """Every kind gives whole granules of real memory."""
        segment = gpu.allocate_segment(nbytes, kind)
        assert segment.nbytes == -(-nbytes // gpu.granularity) * gpu.granularity
        write_and_read(gpu, segment.address, segment.nbytes)
        gpu.free_segment(segment)

    @pytest.mark.parametrize("kind", KINDS)
    def test_go_back_to_the_driver(self, gpu: Gpu, kind: str) -> None:
        """What was given back others can have: the driver's own pool keeps nothing either."""
        first = gpu.allocate_segment(2 * MIB, kind)  # with it comes what the driver needs for itself, once
        gpu.default_stream.synchronize_blocking()
        gpu.free_segment(first)
        free = gpu.memory().free
        segment = gpu.allocate_segment(64 * MIB, kind)
        assert gpu.memory().free <= free - 64 * MIB
        gpu.default_stream.synchronize_blocking()
        gpu.free_segment(segment)
        assert gpu.memory().free >= free

    @pytest.mark.fake_only
    @pytest.mark.parametrize("kind", KINDS)
    def test_too_much_says_what_is_free(self, fake: FakeDriver, gpu: Gpu, kind: str) -> None:
        """A refusal has the facts, starts as code for other allocators expects, and takes nothing."""
        fake.others(700 * MIB)
        with pytest.raises(OutOfMemoryError, match=r"^(CUDA OOM: CUDA out of memory\. On|out of memory on)") as caught:
            gpu.allocate_segment(512 * MIB, kind)
        facts = caught.value.facts
        assert (facts.asked, facts.device, facts.device_free) == (512 * MIB, gpu.name, 324 * MIB)
        assert str(caught.value).startswith("CUDA OOM") == (gpu.kind == "cuda")
        assert fake.used() == 0
        fake.others(0)
        segment = gpu.allocate_segment(512 * MIB, kind)
        gpu.default_stream.synchronize_blocking()
        gpu.free_segment(segment)

    def test_memory_of_others_is_seen(self, gpu: Gpu) -> None:
        """What the driver has given to anybody is not free."""
        before = gpu.memory()
        other = type(gpu)()
        segment = other.allocate_segment(64 * MIB, "direct")
        after = gpu.memory()
        assert after.total == before.total == gpu.capacity
        assert after.free <= before.free - 64 * MIB
        other.free_segment(segment)
        other.close()

    def test_segments_in_stream_order_are_there_for_their_stream(self, gpu: Gpu) -> None:
        """No wait is needed on the stream that they were taken for."""
        stream = gpu.create_stream()
        segment = gpu.allocate_segment(MIB, "stream_ordered", stream)
        gpu.fill(segment.address, MIB, 1, stream)
        stream.synchronize_blocking()
        gpu.free_segment(segment)

    def test_two_devices_of_one_card_share_its_context(self, gpu: Gpu) -> None:
        """Each has its own segments, and takes the other's streams."""
        other = type(gpu)()
        assert other.context.handle == gpu.context.handle
        segment = other.allocate_segment(MIB, "direct")
        with pytest.raises(InvalidRequest, match="not given back yet"):
            gpu.free_segment(segment)
        theirs = other.create_stream("theirs")
        ours = gpu.stream_of(theirs)
        assert (ours.handle, ours.device) == (theirs.handle, gpu)
        gpu.fill(segment.address, 1, 1, ours)
        theirs.synchronize_blocking()
        other.free_segment(segment)
        other.close()


class TestStreams:
    @pytest.mark.every_vendor
    def test_default_streams_have_their_names(self, gpu: Gpu) -> None:
        """None, 0 and 1 are the legacy one; 2 is the calling thread's."""
        for source in (None, 0, 1, gpu.default_stream):
            assert gpu.stream_of(source) is gpu.default_stream
        mine = gpu.stream_of(2)
        assert gpu.stream_of(2) is mine
        assert mine is not gpu.default_stream
        theirs: list[Stream] = []
        thread = threading.Thread(target=lambda: theirs.append(gpu.stream_of(2)))
        thread.start()
        thread.join()
        assert theirs[0] is not mine
        assert (gpu.default_stream.native, mine.native, mine.lasting) == (True, False, True)

    @pytest.mark.every_vendor
    def test_come_from_objects_of_other_libraries(self, gpu: Gpu) -> None:
        """By the protocol, or by the attribute that torch, CuPy and numba have; the object is kept, and only then."""
        handle = gpu.context.create_stream()

        class Torch:
            cuda_stream = handle

        class CuPy:
            ptr = handle

        class Numba:
            def __init__(self) -> None:
                self.handle = ctypes.c_void_p(handle)

        class Protocol:
            def __cuda_stream__(self) -> tuple[int, int]:
                return (0, handle)

        for kind in (Torch, CuPy, Numba, Protocol):
            owner = kind()
            stream = gpu.stream_of(owner)
            assert (stream.handle, stream.lasting, stream.native) == (handle, True, True)
            assert stream.keeps is owner
            assert gpu.stream_of(owner) is stream
            assert gpu.stream_of(handle) is stream
            del stream
        gpu.context.destroy_stream(handle)

    @pytest.mark.every_vendor
    def test_default_streams_of_other_libraries_are_ours(self, gpu: Gpu) -> None:
        """torch says 0 for its default stream, numba a null pointer."""

        class Torch:
            cuda_stream = 0

        class Numba:
            handle = ctypes.c_void_p(0)

        assert gpu.stream_of(Torch()) is gpu.stream_of(Numba()) is gpu.default_stream

    @pytest.mark.every_vendor
    def test_a_bare_handle_is_not_lasting_until_an_owner_is_seen(self, gpu: Gpu) -> None:
        """Nobody keeps it alive, so compiled code may not use it either."""
        handle = gpu.context.create_stream()
        stream = gpu.stream_of(handle)
        assert (stream.lasting, stream.native) == (False, False)

        class Owner:
            cuda_stream = handle

        assert gpu.stream_of(Owner()) is stream
        assert (stream.lasting, stream.native) == (True, True)
        del stream
        gpu.context.destroy_stream(handle)

    def test_a_handle_that_is_used_again_is_another_stream(self, gpu: Gpu) -> None:
        """Streams are told apart by the driver's number for them, which no two ever have."""
        handle = gpu.context.create_stream()
        first = gpu.stream_of(handle)
        gpu.context.destroy_stream(handle)
        made = []
        while handle not in made and len(made) < 64:  # drivers use handles again soon, but promise nothing
            made.append(gpu.context.create_stream())
        if handle not in made:
            pytest.skip("this driver uses no handle again")
        second = gpu.stream_of(handle)
        assert second is not first
        assert first.name != second.name
        for one in made:
            gpu.context.destroy_stream(one)

    @pytest.mark.every_vendor
    @pytest.mark.parametrize("source", [-1, 3, 4095, 1 << 64, 999_999, 1.0, True, "2", object(), Stream])
    def test_what_cannot_be_a_stream_never_gets_to_the_driver(self, gpu: Gpu, source: object) -> None:
        """It would follow the handle into nowhere."""
        with pytest.raises(InvalidRequest, match="stream"):
            gpu.stream_of(source)

    @pytest.mark.every_vendor
    def test_another_devices_stream_is_refused(self, cards: tuple[Gpu, Gpu]) -> None:
        """It orders nothing here; neither does one of the host or a simulation."""
        first, second = cards

        class Torch:
            device_index = 1
            cuda_stream = 0

        strangers: list[object] = [second.create_stream(), second.default_stream, second.stream_of(2), Torch()]
        strangers += [Host().default_stream, Simulated().default_stream]
        for stranger in strangers:
            with pytest.raises(InvalidRequest, match=first.name):
                first.stream_of(stranger)
        strangers.clear()

    @pytest.mark.fake_only
    def test_a_forgotten_stream_is_destroyed_after_its_work(self, fake: FakeDriver, gpu: Gpu) -> None:
        """The driver lets the work end; the fence tells of it."""
        stream = gpu.create_stream()
        fake.hold(stream.handle)
        fake.launch(stream.handle)
        fence = stream.record()
        before = fake.live().get("streams", 0)
        del stream
        gc.collect()
        assert fake.live().get("streams", 0) == before - 1
        assert not fence.done()
        fake.release()
        assert fence.block(60)

    @pytest.mark.every_vendor
    @pytest.mark.fake_only
    def test_a_threads_stream_is_named_by_itself_only_there(self, fake: FakeDriver, gpu: Gpu) -> None:
        """On another thread its fence is one of everything, and its wait one of all that follow the default stream."""
        mine, other = gpu.stream_of(2), gpu.create_stream()
        fake.hold(other.handle)
        fake.launch(other.handle)
        own = mine.record()
        assert own.block(60)
        held = other.record()

        def elsewhere() -> None:
            fences.append(mine.record())
            mine.wait(held)
            with pytest.raises(InvalidRequest, match="this thread's"):
                gpu.fill(0, 1, 1, mine)
            assert not mine.capturing()

        fences = [own]
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        assert not fences[1].done()
        behind = mine.record()
        assert not behind.done()
        fake.release()
        assert fences[1].block(60)
        assert behind.block(60)

    def test_captures_are_seen(self, gpu: Gpu) -> None:
        """A stream says whether its work is run or only noted, and a fence of everything leaves a capture alone."""
        stream = gpu.create_stream()
        graph = Capture(gpu, stream)
        assert stream.capturing()
        with pytest.raises(DeviceError, match="graph") as caught:
            gpu.record_all()
        assert caught.value.code == 900
        assert gpu.create_stream().record().block(60)
        graph.end()
        assert not stream.capturing()
        assert gpu.record_all().block(60)

    def test_captures_of_others_are_not_ended(self, gpu: Gpu) -> None:
        """Growing, asking for fences and waiting go on while another thread captures in the strictest mode."""
        stream = gpu.create_stream()
        graph = Capture(gpu, stream)
        segments, birth = [], gpu.create_stream()
        for kind in KINDS:
            segment = gpu.allocate_segment(MIB, kind, birth)
            assert birth.record().block(60)
            assert gpu.create_stream().record().block(60)
            gpu.memory()
            segments.append(segment)
        for segment in segments:
            gpu.free_segment(segment)
        graph.end()
        assert graph.failure is None


class Capture:
    """A graph captured on a stream in the global mode, on a thread of its own, until `end`; not for long without."""

    def __init__(self, gpu: Gpu, stream: Stream) -> None:
        self._cuda, self._stream = gpu, stream
        self._ends, self._begun = threading.Event(), threading.Event()
        self.failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        assert self._begun.wait(60)

    def end(self) -> None:
        self._ends.set()
        self._thread.join()
        assert self.failure is None

    def _run(self) -> None:
        from cuda.bindings import driver  # type: ignore[import-untyped]

        try:
            (code,) = driver.cuCtxPushCurrent(self._cuda.context.handle)
            assert code == 0
            mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL
            (code,) = driver.cuStreamBeginCapture(self._stream.handle, mode)
            assert code == 0
            self._begun.set()
            self._ends.wait(60)
            code, graph = driver.cuStreamEndCapture(self._stream.handle)
            assert code == 0
            driver.cuGraphDestroy(graph)
            driver.cuCtxPopCurrent()
        except BaseException as error:  # noqa: BLE001  # shown by the thread of the test
            self.failure = error
            self._begun.set()


@pytest.mark.every_vendor
class TestFences:
    @pytest.mark.fake_only
    def test_events_serve_again(self, fake: FakeDriver, gpu: Gpu) -> None:
        """A thousand fences in turn take one event."""
        gpu.default_stream.record()
        before = fake.calls("cuEventCreate")
        for _ in range(1000):
            assert gpu.default_stream.record().done()
        assert fake.calls("cuEventCreate") == before

    @pytest.mark.fake_only
    def test_a_fence_that_is_reached_is_not_asked_for_again(self, fake: FakeDriver, gpu: Gpu) -> None:
        """Reached is for ever, so the driver has nothing to add."""
        fence = gpu.default_stream.record()
        assert fence.done()
        before = fake.calls()
        assert fence.done()
        assert fence.block()
        gpu.create_stream()  # which keeps the count from being equal for a wrong reason
        assert fake.calls("cuEventQuery") == 1
        assert fake.calls() > before

    @pytest.mark.fake_only
    def test_a_fence_of_everything_covers_each_stream(self, fake: FakeDriver, gpu: Gpu) -> None:
        """Default streams, a stream of ours, and a forgotten one."""
        streams: list[Callable[[], Stream]] = [
            lambda: gpu.default_stream,
            lambda: gpu.stream_of(2),
            gpu.create_stream,
        ]
        for make in streams:
            stream = make()
            fake.hold(stream.handle)
            fake.launch(stream.handle)
            del stream
            fence = gpu.record_all()
            assert not fence.done()
            fake.release()
            assert fence.block(60)

    @pytest.mark.fake_only
    def test_a_lost_device_fails_every_wait(self, fake: FakeDriver, kind_of_gpu: Kinds) -> None:
        """Nobody waits for ever: asking, blocking and notices all end."""
        gpu = kind_of_gpu(0)
        fake.hold(1)
        fake.launch(1)
        fence = gpu.default_stream.record()
        told = threading.Event()
        fence.notify(told.set)
        fake.lose()
        assert told.wait(60)
        for call in (fence.done, fence.block, fence.done):
            with pytest.raises(DeviceError, match=r"(?i)illegal_?address"):
                call()
        late = threading.Event()
        fence.notify(late.set)
        assert late.is_set()
        gpu.close()
        fake.reset()

    def test_fences_of_cards_can_wait_for_each_other(self, cards: tuple[Gpu, Gpu]) -> None:
        """A stream of one card goes on behind work of another."""
        first, second = cards
        second.default_stream.wait(first.default_stream.record())
        assert second.default_stream.record().block(60)
        with pytest.raises(InvalidRequest, match=second.name):
            second.default_stream.wait(Host().default_stream.record())


@pytest.mark.every_vendor
class TestCopies:
    def test_page_locked_memory_holds_nobody_up(self, gpu: Gpu) -> None:
        """The device knows which host memory its copies can use as it is."""
        pinned = gpu.pinned()
        segment = pinned.allocate_segment(MIB)
        view = bytes_at(segment.address, MIB)
        assert not gpu.copy_holds_up(memoryview(view))
        assert gpu.copy_holds_up(memoryview(bytearray(MIB)))
        assert not gpu.copy_holds_up(memoryview(b""))
        there = gpu.allocate_segment(MIB, "direct")
        stream = gpu.create_stream()
        view[:] = np.arange(MIB) % 251
        gpu.copy_in(there.address, memoryview(view), stream)
        pinned.fill(segment.address, MIB, 0, stream)
        gpu.copy_out(memoryview(view), there.address, stream)
        stream.synchronize_blocking()
        assert (view == np.arange(MIB) % 251).all()
        gpu.free_segment(there)
        pinned.free_segment(segment)

    def test_empty_copies_ask_the_driver_nothing(self, gpu: Gpu) -> None:
        """Zero bytes are copied already."""
        before = gpu.driver_calls
        gpu.fill(0, 0, 0, gpu.default_stream)
        gpu.copy(0, 0, 0, gpu.default_stream)
        gpu.copy_in(0, memoryview(b""), gpu.default_stream)
        gpu.copy_out(memoryview(bytearray()), 0, gpu.default_stream)
        gpu.peer_copy(0, 0, 0, gpu, gpu.default_stream)
        assert gpu.driver_calls == before

    @pytest.mark.parametrize("runner", [0, 1])
    def test_cards_copy_from_each_other(self, cards: tuple[Gpu, Gpu], runner: int) -> None:
        """On a stream of either."""
        first, second = cards
        source, target = (card.allocate_segment(MIB, "direct") for card in cards)
        back = bytearray(2)
        stream = cards[runner].create_stream()
        first.fill(source.address, 2, 9, first.default_stream)
        first.default_stream.synchronize_blocking()
        second.peer_copy(target.address, source.address, 2, first, stream)
        stream.synchronize_blocking()
        second.copy_out(memoryview(back), target.address, second.default_stream)
        second.default_stream.synchronize_blocking()
        assert list(back) == [9, 9]
        with pytest.raises(InvalidRequest, match=f"{first.interface.name} device"):
            second.peer_copy(0, 0, 1, Host(), stream)
        first.free_segment(source)
        second.free_segment(target)

    def test_access_is_granted_to_cards_that_have_a_link(self, cards: tuple[Gpu, Gpu]) -> None:
        """Twice is fine; a host has none, and no card needs one to itself."""
        first, second = cards
        segment = first.allocate_segment(MIB, "direct")
        first.grant_access([second, first])
        first.grant_access([second])
        second.fill(segment.address, 4, 3, second.default_stream)
        second.default_stream.synchronize_blocking()
        strangers: list[Device] = [Host(), Simulated()]
        for stranger in strangers:
            with pytest.raises(InvalidRequest, match="peers"):
                first.grant_access([stranger])
        first.free_segment(segment)

    @pytest.mark.fake_only
    def test_a_card_without_a_link_is_named(self, fake: FakeDriver, kind_of_gpu: Kinds) -> None:
        """And is granted nothing."""
        fake.devices(2)
        first, second = kind_of_gpu(0), kind_of_gpu(1)
        fake.unlink(1, 0)
        with pytest.raises(InvalidRequest, match="devices that can reach"):
            first.grant_access([second])
        first.close()
        second.close()


class TestNotifications:
    @pytest.mark.fake_only
    def test_being_over_budget_is_counted(self, fake: FakeDriver, gpu: Gpu) -> None:
        """Each notice counts, from this device's opening on, and nobody listens to a closed one."""
        assert fake.over_budget(MIB) == 1
        later = Cuda()
        assert (gpu.over_budget, later.over_budget) == (1, 0)
        fake.over_budget(MIB)
        assert (gpu.over_budget, later.over_budget, gpu.pinned().over_budget) == (2, 1, 2)
        later.close()
        assert fake.over_budget(MIB) == 1
        gpu.close()
        assert fake.over_budget(MIB) == 0


class TestClosing:
    @pytest.mark.fake_only
    @pytest.mark.parametrize("kind", [*KINDS, "pinned"])
    def test_the_context_outlives_the_last_segment(self, fake: FakeDriver, kind: str) -> None:
        """A closed device gives back what is held, whenever that comes; then all is gone."""
        fake.reset()
        gpu = Cuda()
        owner = gpu.pinned() if kind == "pinned" else gpu
        segment = owner.allocate_segment(MIB, kind)
        gpu.default_stream.synchronize_blocking()
        gpu.close()
        gpu.close()
        assert fake.live()["contexts"] == 1
        with pytest.raises(InvalidRequest, match="open"):
            owner.allocate_segment(MIB, kind)
        owner.free_segment(segment)
        assert fake.live() == {}

    @pytest.mark.fake_only
    def test_the_context_outlives_the_last_fence_and_stream(self, fake: FakeDriver) -> None:
        """Whoever still asks gets an answer."""
        fake.reset()
        gpu = Cuda()
        stream = gpu.create_stream()
        fake.hold(stream.handle)
        fake.launch(stream.handle)
        fence = stream.record()
        gpu.close()
        assert not fence.done()
        fake.release()
        assert fence.block(60)
        assert fake.live()["contexts"] == 1
        del fence, stream
        gc.collect()
        assert fake.live() == {}

    @pytest.mark.every_vendor
    @pytest.mark.fake_only
    def test_a_device_that_is_forgotten_leaves_no_thread(self, fake: FakeDriver, kind_of_gpu: Kinds) -> None:
        """Closing is better, but forgetting is no leak of threads."""
        before = set(threading.enumerate())
        gpu = kind_of_gpu(0)
        fence = gpu.default_stream.record()
        told = threading.Event()
        fake.hold(1)
        busy = gpu.default_stream.record()
        busy.notify(told.set)
        thread = next(iter(set(threading.enumerate()) - before))
        fake.release()
        assert told.wait(60)
        del gpu, fence, busy
        gc.collect()
        thread.join(60)
        assert not thread.is_alive()

    @pytest.mark.fake_only
    def test_a_reset_device_can_be_opened_anew(self, fake: FakeDriver) -> None:
        """What somebody's reset has taken is gone; a new device begins with the new context."""
        old = Cuda()
        fence = old.default_stream.record()
        fake.reset()
        new = Cuda()
        new.free_segment(new.allocate_segment(MIB))
        assert new.default_stream.record().block(60)
        with pytest.raises(DeviceError):
            fence.done()
        old._segments._sources.clear()
        del fence, old
        gc.collect()
        new.close()
        gc.collect()
        assert fake.live() == {}


WAYS = {
    "stream_ordered": ("cuMemAllocFromPoolAsync", "cuStreamSynchronize"),
    "direct": ("cuMemAlloc", "cuMemFree"),
}


@pytest.mark.fake_only
@pytest.mark.parametrize("kind", WAYS)
@pytest.mark.parametrize("comes", [True, False])
def test_a_segment_on_its_way_keeps_what_it_comes_from(spotless: FakeDriver, kind: str, comes: bool) -> None:
    """The device is closed while a thread takes a segment, or gives the last one back."""
    device = Cuda()
    segments = [] if comes else [device.allocate_segment(MIB, kind)]
    device.default_stream.synchronize_blocking()
    call = WAYS[kind][not comes]

    def move() -> None:
        if comes:
            segments.append(device.allocate_segment(MIB, kind))
        else:
            device.free_segment(segments.pop())

    before = spotless.calls(call)
    spotless.latency(call, 100_000_000)
    thread = threading.Thread(target=move)
    thread.start()
    while spotless.calls(call) == before:
        time.sleep(0.001)
    device.close()
    thread.join()
    assert len(segments) == comes
    for segment in segments:
        device.default_stream.synchronize_blocking()
        device.free_segment(segment)
