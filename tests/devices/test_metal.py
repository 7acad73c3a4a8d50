"""What is special about Metal: whole words, shared memory, work that fails in silence, and PyObjC's ways."""

import asyncio
import inspect
import sys
import threading
from dataclasses import asdict
from functools import partial
from typing import Any

import numpy as np
import pytest

from asyncmem import AsyncMemoryPool, BackendUnavailable, DeviceError, InvalidRequest, OutOfMemoryError
from asyncmem.cli import machine as probing
from asyncmem.devices import Metal, Segment, device, devices, select_device_for
from asyncmem.devices.host_memory import PAGE
from asyncmem.devices.metal import api
from asyncmem.devices.metal.device import DEPTH
from tests.cuda.fake import FakeDriver
from tests.metal.fake import TIMED_OUT, FakeMetal, bridge, memory, queue, work
from tests.metal.session import in_place

MIB = 1 << 20
SOON = 60


class Gate:
    """Holds queues up until it is opened."""

    def __init__(self, metal: Metal) -> None:
        self._driver = metal.driver
        self._event = metal.driver.make(metal.mtl_device.newSharedEvent)

    def hold(self, queue: Any) -> None:
        with self._driver.pool():
            work = queue.commandBuffer()
            work.encodeWaitForEvent_value_(self._event, 1)
            work.commit()

    def open(self) -> None:
        self._event.setSignaledValue_(1)


@pytest.fixture
def other(metal: Metal) -> Segment:
    return metal.allocate_segment(MIB)


def read(metal: Metal, address: int, nbytes: int) -> np.ndarray:
    back = np.zeros(nbytes, np.uint8)
    metal.copy_out(back.data, address, metal.default_stream)
    metal.default_stream.synchronize_blocking()
    return back


class TestWork:
    def test_of_other_code_uses_the_memory_of_a_pool(self, metal: Metal) -> None:
        """A buffer and where in it, which is what Metal's encoders take; in the order of the stream."""

        async def main() -> None:
            async with AsyncMemoryPool(metal, limit="8 MiB") as pool:
                batch = await pool.empty_batch([(64,), (64,)], "int32")
                metal.fill(batch.buffer.address, batch.buffer.nbytes, 1, metal.default_stream)
                buffer, offset = metal.as_buffer(batch[1])
                with metal.driver.pool():
                    work = metal.default_stream.queue.commandBuffer()
                    blit = work.blitCommandEncoder()
                    blit.fillBuffer_range_value_(buffer, (offset, batch[1].nbytes), 2)
                    blit.endEncoding()
                    work.commit()
                back = np.zeros(batch.buffer.nbytes, np.uint8)
                await batch.buffer.copy_to(back)
                begin = batch[1].address - batch.buffer.address
                assert set(back[begin : begin + 256]) == {2}
                assert set(back[:begin]) == {1}
                batch.buffer.free()

        asyncio.run(main())

    def test_that_is_awaited_leaves_the_loop_alone(self, metal: Metal) -> None:
        """A copy behind a gate that another task opens."""

        async def main() -> None:
            gate, back = Gate(metal), np.zeros(1001, np.uint8)
            async with AsyncMemoryPool(metal, limit="8 MiB") as pool, pool.allocate_async(1001) as buffer:
                await buffer.copy_from(np.full(1001, 9, np.uint8))
                gate.hold(metal.default_stream.queue)
                copy = asyncio.ensure_future(_awaited(buffer.copy_to(back)))
                await asyncio.sleep(0.001)
                assert not copy.done()
                assert not back.any()
                gate.open()
                await asyncio.wait_for(copy, SOON)
                assert set(back) == {9}

        asyncio.run(main())

    @pytest.mark.parametrize("value", [0, 1, 127, 128, 255])
    def test_fills_with_every_byte(self, metal: Metal, other: Segment, value: int) -> None:
        """PyObjC has it that a byte is signed."""
        metal.fill(other.address, 64, value, metal.default_stream)
        metal.fill(other.address + 65, 3, value, metal.default_stream)
        assert set(read(metal, other.address, 64)) == {value}
        assert set(read(metal, other.address + 65, 3)) == {value}

    @pytest.mark.parametrize("delay", [0, 0.0005])
    def test_of_all_places_and_sizes_is_done(self, machine: FakeMetal, metal_of_machine: Metal, delay: float) -> None:
        """Metal does whole words, the host the rest; each comes behind the other, on two streams that take turns."""
        machine.delay = delay
        metal, random = metal_of_machine, np.random.default_rng(1)
        other, streams = metal.allocate_segment(MIB), (metal.default_stream, metal.create_stream())
        model = random.integers(0, 256, 512, np.uint8)
        metal.copy_in(other.address, model.data, streams[0])
        for turn in range(60):
            stream = streams[turn % 2]
            stream.wait(streams[turn % 2 - 1].record())
            there, here = int(random.integers(0, 100)), int(random.integers(256, 356))
            nbytes = int(random.integers(1, 100))
            if random.integers(2):
                there, here, nbytes = there // 4 * 4, here // 4 * 4, -(-nbytes // 4) * 4
            if random.integers(2):
                model[there : there + nbytes] = model[here : here + nbytes]
                metal.copy(other.address + there, other.address + here, nbytes, stream)
            else:
                model[here : here + nbytes] = there
                metal.fill(other.address + here, nbytes, there, stream)
        assert metal.record_all().block(SOON)
        assert (read(metal, other.address, 512) == model).all()

    def test_of_the_host_may_come_in_between(self, metal: Metal, monkeypatch: pytest.MonkeyPatch) -> None:
        """The queue comes to it in the order in which the host does it, or both would wait for ever."""
        stream, done = metal.create_stream(), []
        submit = stream.work.submit

        def interrupted(encode: Any, *behind: Any) -> None:
            """Have more of it asked for on this very thread, as a finalizer may."""
            monkeypatch.undo()
            stream.run_on_host(partial(done.append, "before"))
            submit(encode, *behind)
            stream.run_on_host(partial(done.append, "behind"))

        monkeypatch.setattr(stream.work, "submit", interrupted)
        stream.run_on_host(partial(done.append, "first"))
        assert stream.record().block(SOON)
        assert done == ["first", "before", "behind"]

    def test_is_taken_while_none_of_it_runs(self, metal: Metal, other: Segment) -> None:
        """Metal's own queues would hold up the 65th who comes, and with it an event loop."""
        gate, stream = Gate(metal), metal.create_stream()
        gate.hold(stream.queue)
        for number in range(300):
            metal.fill(other.address, 64, number % 256, stream)
        assert DEPTH >= 1000
        assert not stream.record().done()
        gate.open()
        assert stream.record().block(SOON)
        assert set(read(metal, other.address, 64)) == {299 - 256}

    def test_that_nobody_asks_for_is_forgotten_once_it_has_run(
        self, machine: FakeMetal, metal_of_machine: Metal
    ) -> None:
        """What comes next finds that out."""
        metal = metal_of_machine
        segment, stream = metal.allocate_segment(MIB), metal.default_stream
        for _ in range(100):
            metal.fill(segment.address, 64, 1, stream)
        machine.wait(lambda: not machine.busy)
        metal.fill(segment.address, 64, 1, stream)
        assert len(stream.work._open) == 1

    def test_is_refused_outside_of_the_devices_memory(self, metal: Metal, other: Segment) -> None:
        """Metal would have to be told of a buffer, and there is none."""
        end, host = other.address + other.nbytes, np.zeros(8, np.uint8)
        for call in (
            partial(metal.fill, end - 4, 8, 1),
            partial(metal.copy, other.address, host.ctypes.data, 8),
            partial(metal.copy_in, end - 4, host.data),
            partial(metal.copy_out, host.data, 4096),
        ):
            with pytest.raises(InvalidRequest, match="within one segment"):
                call(metal.default_stream)


async def _awaited(copy: Any) -> None:
    await copy


class TestMemory:
    def test_is_the_hosts(self, metal: Metal) -> None:
        """What the device wrote is read where it is, and staging it would be of no use."""
        assert metal.pinned() is metal

        async def main() -> None:
            async with AsyncMemoryPool(metal, limit="8 MiB") as pool, pool.allocate_async(1000) as buffer:
                metal.fill(buffer.address, 1000, 5, buffer.stream)
                await buffer.stream.synchronize()
                assert set(np.asarray(buffer)) == {5}
                array = buffer.view("uint8")
                assert array.__dlpack_device__() == (1, 0)
                assert set(np.from_dlpack(array)) == {5}

        asyncio.run(main())

    @pytest.mark.parametrize("knows", [False, True], ids=["pyobjc-12.2.2", "pyobjc-12.2.3"])
    def test_goes_back(self, machine: FakeMetal, knows: bool) -> None:
        """Whether or not PyObjC knows that what is new has an owner; nothing is let go of twice either."""
        machine.knows_who_owns = knows
        metal = Metal()
        before = metal.memory().free
        segments = [metal.allocate_segment(MIB) for _ in range(3)]
        assert machine.allocated == 3 * (MIB + PAGE)
        for segment in segments:
            metal.free_segment(segment)
        assert machine.allocated == 0
        assert metal.memory().free >= before - MIB
        metal.close()

    def test_stays_for_as_long_as_other_code_has_it(self, machine: FakeMetal) -> None:
        """The buffer that `as_buffer` answered is an owner as any other."""
        metal = Metal()
        segment = metal.allocate_segment(MIB)
        buffer, offset = metal.as_buffer(segment)
        assert 0 <= offset < PAGE
        metal.free_segment(segment)
        assert machine.allocated == MIB + PAGE
        del buffer
        assert machine.allocated == 0
        with pytest.raises(InvalidRequest, match="within one segment"):
            metal.as_buffer(segment)
        metal.close()

    def test_is_no_more_than_the_device_uses_well(self, machine: FakeMetal) -> None:
        """Metal would give more, and what uses it would fail; who else of this process has some is counted."""
        machine.total, machine.most = 64 * MIB, 64 * MIB
        metal, other = Metal(), Metal()
        segment = other.allocate_segment(40 * MIB)
        with pytest.raises(OutOfMemoryError) as refused:
            metal.allocate_segment(40 * MIB)
        assert (refused.value.asked, refused.value.facts.device_free) == (40 * MIB, 24 * MIB - PAGE)
        assert metal.memory().total == 64 * MIB
        other.free_segment(segment)
        metal.free_segment(metal.allocate_segment(40 * MIB))
        metal.close()
        other.close()

    def test_that_metal_refuses_is_out_of_memory(self, machine: FakeMetal) -> None:
        """It returns nothing then; a later try may succeed."""
        metal = Metal()
        machine.spare = MIB
        with pytest.raises(OutOfMemoryError):
            metal.allocate_segment(2 * MIB)
        machine.spare = 4 * MIB
        metal.free_segment(metal.allocate_segment(2 * MIB))
        metal.close()

    def test_in_one_piece_is_what_metal_gives(self, machine: FakeMetal) -> None:
        """The error says how much that is."""
        machine.most = 8 * MIB
        metal = Metal()
        with pytest.raises(OutOfMemoryError, match="at most 8 MiB in one piece"):
            metal.allocate_segment(8 * MIB)
        metal.free_segment(metal.allocate_segment(7 * MIB))
        metal.close()


class TestQueues:
    def test_of_other_devices_are_refused(self) -> None:
        """Their work cannot be in order with this one's memory; neither can what is no queue."""
        machine = FakeMetal(gpus=2)
        with in_place(machine):
            first, second = Metal(0), Metal(1)
        for source in (second.default_stream.queue, first.mtl_device, first.default_stream.work.event):
            with pytest.raises(InvalidRequest, match="a command queue of 'metal:0'"):
                first.stream_of(source)
        with pytest.raises(InvalidRequest, match="peers"):
            first.grant_access([second])
        first.close()
        second.close()
        machine.stop()


class TestFailures:
    def test_of_work_are_told_in_metals_words(self, machine: FakeMetal, metal_of_machine: Metal) -> None:
        """To who waits for a fence behind it, in any way; what comes after that is not concerned."""
        metal = metal_of_machine
        segment = metal.allocate_segment(MIB)
        machine.fail_work()
        metal.fill(segment.address, 64, 1, metal.default_stream)
        fence, everything = metal.default_stream.record(), metal.record_all()
        told = threading.Event()
        fence.notify(told.set)
        assert told.wait(SOON)
        for ask in (fence.block, fence.done, everything.block):
            with pytest.raises(DeviceError, match="kIOGPUCommandBufferCallbackErrorTimeout") as caught:
                ask()
        assert (caught.value.code, caught.value.code_name, caught.value.device) == (2, TIMED_OUT, "metal:0")
        with pytest.raises(DeviceError):
            asyncio.run(_awaited(fence))
        assert metal.default_stream.record().block(SOON)

    def test_of_work_let_those_go_on_who_wait_for_it(self, machine: FakeMetal, metal_of_machine: Metal) -> None:
        """Metal would leave them waiting; they learn of it."""
        metal = metal_of_machine
        first, second = metal.create_stream(), metal.create_stream()
        machine.fail_work()
        second.wait(first.record())
        behind = second.record()
        with pytest.raises(DeviceError, match="Timeout"):
            behind.block(SOON)
        assert second.record().block(SOON)

    def test_of_work_before_it_are_those_of_a_fence_elsewhere(
        self, machine: FakeMetal, metal_of_machine: Metal
    ) -> None:
        """Whoever is behind a stream is behind what that was to do."""
        metal = metal_of_machine
        segment = metal.allocate_segment(MIB)
        first, second = metal.create_stream(), metal.create_stream()
        machine.fail_work()
        metal.fill(segment.address, 64, 1, first)
        second.wait(first.record())
        with pytest.raises(DeviceError, match="Timeout"):
            second.record().block(SOON)

    def test_of_queues_are_no_obstacle_to_asking_in_circles(self, metal: Metal) -> None:
        """Two streams that wait for each other again and again, all of it before anything runs."""
        first, second, gate = metal.create_stream(), metal.create_stream(), Gate(metal)
        gate.hold(first.queue)
        for _ in range(50):
            second.wait(first.record())
            first.wait(second.record())
        ends = first.record(), second.record()
        assert not any(end.done() for end in ends)
        gate.open()
        assert all(end.block(SOON) for end in ends)


@pytest.fixture
def metal_of_machine(machine: FakeMetal) -> Any:
    """The device of the machine that the test steers."""
    assert machine
    metal = Metal()
    yield metal
    metal.close()


class TestFinding:
    def test_begins_with_the_systems_own_choice(self) -> None:
        """However the list is ordered."""
        machine = FakeMetal(gpus=3)
        with in_place(machine):
            assert [Metal(at).mtl_device for at in range(3)] == [
                machine.gpus[0], machine.gpus[2], machine.gpus[1],
            ]  # fmt: skip
            with pytest.raises(BackendUnavailable, match="metal:0 to metal:2"):
                device("metal:3")
            with pytest.raises(InvalidRequest, match="index"):
                Metal(-1)

    def test_says_what_to_install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """It is an extra, and of macOS."""
        monkeypatch.setitem(sys.modules, "Metal", None)
        with pytest.raises(BackendUnavailable, match=r"asyncmem\[metal\]") as caught:
            device("metal")
        assert "PyObjC" in str(caught.value)

    def test_says_that_there_is_no_gpu(self) -> None:
        """As on some virtual machines."""
        with in_place(FakeMetal(gpus=0)), pytest.raises(BackendUnavailable, match="no device"):
            device("metal")

    @pytest.mark.fake_only
    def test_is_automatic_where_cuda_has_no_gpu(self, machine: FakeMetal, fake: FakeDriver) -> None:
        """Before the host."""
        fake.devices(0)
        assert machine
        made = device("auto")
        assert made.name == "metal:0"
        made.close()

    @pytest.mark.fake_only
    def test_lists_it_before_the_host(self, machine: FakeMetal, fake: FakeDriver) -> None:
        """With its room, or with what is wrong."""
        fake.devices(0)
        listed = {one.name: one for one in devices()}
        assert [name for name in listed if name != "rocm"][:2] == ["cuda", "metal:0"]  # where HIP is, that has its line
        assert (listed["metal:0"].usable, listed["metal:0"].total) == (True, machine.total)
        assert select_device_for("64 MiB") == select_device_for("64 MiB", prefer="metal") == "metal:0"
        machine.fail("newSharedEvent")
        (line,) = (one for one in devices() if one.kind == "metal")
        assert "newSharedEvent failed" in str(line.reason)

    def test_is_reported_as_never_tried(self, machine: FakeMetal, monkeypatch: pytest.MonkeyPatch) -> None:
        """Somebody has to do it: the doctor asks for that, with or without a device."""
        monkeypatch.setattr(probing, "ask", lambda *_: ([asdict(one) for one in probing.probe("metal")], None))
        (found,) = probing.find_devices("metal")
        assert (found.name, found.total_bytes) == ("metal:0", machine.total)
        assert "never run on hardware" in found.detail
        monkeypatch.setattr(probing, "find_spec", lambda _: None)
        assert "never run on hardware" in probing.find_devices("metal")[0].detail


def test_the_stand_in_has_what_is_used_of_metal() -> None:
    """By the same names, each with as many arguments as it has colons."""
    there = {name: kind for module in (bridge, memory, queue, work) for name, kind in vars(module).items()}
    protocols = [(name, one) for name, one in vars(api).items() if name.startswith(("MTL", "NS"))]
    assert len(protocols) > 6
    for name, protocol in protocols:
        for method, function in vars(protocol).items():
            if inspect.isfunction(function) and not method.startswith("_"):
                assert len(inspect.signature(function).parameters) - 1 == method.count("_")
                assert method in vars(there[name]), (name, method)
