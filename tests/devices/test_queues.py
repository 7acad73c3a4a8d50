"""What devices over queues of a driver have in common: queues of other code, threads that ask, work that fails."""

import asyncio
import gc
import subprocess
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from asyncmem import DeviceError, InvalidRequest
from asyncmem.devices import Device, Host, Metal, OpenCL, Stream
from asyncmem.devices.fences import PolledFence
from tests.metal.session import REAL
from tests.processor import open_processor

MIB = 1 << 20


class Kit(ABC):
    """Devices of one kind, and their driver by itself."""

    opening: str
    """A program that opens a device and holds up its default stream for ever."""

    def __init__(self) -> None:
        self.opened: list[Any] = []
        self.device = self.open()

    def open(self) -> Any:
        """Make another object for the same device, which the fixture closes."""
        self.opened.append(self.make())
        return self.opened[-1]

    @abstractmethod
    def make(self) -> Device: ...

    @abstractmethod
    def queue(self) -> Any:
        """Make a queue as other code does."""

    @abstractmethod
    def hold(self, queue: object) -> Callable[[], None]:
        """Hold a queue up, by the driver alone; what is answered lets it go."""


class OpenCLKit(Kit):
    opening = (
        "from asyncmem.devices import OpenCL\n"
        "device = OpenCL()\n"
        "cl = device.driver.cl\n"
        "cl.enqueue_barrier(device.default_stream.queue, wait_for=[cl.UserEvent(device.context)])\n"
    )

    def make(self) -> OpenCL:
        return open_processor()

    def queue(self) -> Any:
        return self.device.driver.cl.CommandQueue(self.device.context)

    def hold(self, queue: Any) -> Callable[[], None]:
        cl = self.device.driver.cl
        gate = cl.UserEvent(self.device.context)
        cl.enqueue_barrier(queue, wait_for=[gate])
        return lambda: gate.set_status(cl.command_execution_status.COMPLETE)


class MetalKit(Kit):
    stand_in = (
        ""
        if REAL
        else f"import sys; sys.path.append({str(Path(__file__).parents[2])!r})\n"
        "from tests.metal.fake import FakeMetal; sys.modules.update(FakeMetal().modules())\n"
    )
    opening = (
        f"{stand_in}from asyncmem.devices import Metal\n"
        "device = Metal()\n"
        "with device.driver.pool():\n"
        "    work = device.default_stream.queue.commandBuffer()\n"
        "    work.encodeWaitForEvent_value_(device.mtl_device.newSharedEvent(), 1)\n"
        "    work.commit()\n"
    )

    def make(self) -> Metal:
        return Metal()

    def queue(self) -> Any:
        return self.device.driver.make(self.device.mtl_device.newCommandQueue)

    def hold(self, queue: Any) -> Callable[[], None]:
        driver = self.device.driver
        gate = driver.make(self.device.mtl_device.newSharedEvent)
        with driver.pool():
            work = queue.commandBuffer()
            work.encodeWaitForEvent_value_(gate, 1)
            work.commit()
        return lambda: gate.setSignaledValue_(1)


@pytest.fixture(params=["opencl", "metal"])
def kit(request: pytest.FixtureRequest) -> Iterator[Kit]:
    if request.param == "metal" and not REAL:
        request.getfixturevalue("machine")
    kit = OpenCLKit() if request.param == "opencl" else MetalKit()
    yield kit
    for device in kit.opened:
        device.close()


class TestQueues:
    def test_of_other_code_are_streams(self, kit: Kit) -> None:
        """The same one for each time that the queue is named, and only for as long as it is used."""
        queue = kit.queue()
        stream = kit.device.stream_of(queue)
        assert kit.device.stream_of(queue) is stream
        assert kit.device.stream_of(stream.handle) is stream
        assert stream.queue == queue

    def test_of_other_code_are_waited_for_as_a_whole(self, kit: Kit) -> None:
        """A fence of the stream is behind commands that the device never saw."""
        queue = kit.queue()
        stream = kit.device.stream_of(queue)
        let_go = kit.hold(queue)
        fence, everything = stream.record(), kit.device.record_all()
        assert not fence.block(0.01)
        assert not everything.done()
        let_go()
        assert fence.block(10)
        assert everything.block(10)

    def test_wait_for_fences_of_another_object_for_the_device(self, kit: Kit) -> None:
        """Not for those of another kind of device."""
        stream = kit.open().create_stream()
        let_go = kit.hold(stream.queue)
        kit.device.default_stream.wait(stream.record())
        behind = kit.device.default_stream.record()
        assert not behind.block(0.01)
        let_go()
        assert behind.block(10)
        with pytest.raises(InvalidRequest, match="fence"):
            kit.device.default_stream.wait(Host().default_stream.record())


class TestMemory:
    def test_that_a_forgotten_device_gave_out_stays(self, kit: Kit) -> None:
        """Buffers may outlive whoever made them."""
        device = kit.make()
        address = device.allocate_segment(MIB).address
        device.close()
        del device
        gc.collect()
        kit.device.fill(address, MIB, 5, kit.device.default_stream)
        back = bytearray(2)
        kit.device.copy_out(memoryview(back), address + MIB - 2, kit.device.default_stream)
        kit.device.default_stream.synchronize_blocking()
        assert back == b"\5\5"

    def test_of_another_device_is_not_copied_from(self, kit: Kit) -> None:
        """One device's objects and its page-locked memory are one place, and nothing else is."""
        other = kit.open()
        kit.device.grant_access([other, other.pinned()])
        with pytest.raises(InvalidRequest, match="peers"):
            kit.device.grant_access([Host()])
        with pytest.raises(InvalidRequest, match="source_device"):
            kit.device.peer_copy(0, 0, 1, Host(), kit.device.default_stream)

    def test_is_refused_once_the_device_is_closed(self, kit: Kit) -> None:
        """Buffers may go back, and nothing new begins."""
        device = kit.open()
        device.close()
        begun: list[Callable[[], object]] = [
            device.create_stream,
            lambda: device.allocate_segment(MIB),
            lambda: device.fill(kit.device.allocate_segment(MIB).address, 1, 0, None),
        ]
        for call in begun:
            with pytest.raises(InvalidRequest, match="open"):
                call()


class TestThreads:
    def test_begin_with_the_first_who_waits_and_end_with_a_forgotten_device(self, kit: Kit) -> None:
        """Recording and asking need none."""
        device, before, told = kit.make(), set(threading.enumerate()), threading.Event()
        let_go = kit.hold(device.default_stream.queue)
        fence = device.default_stream.record()
        assert not fence.done()
        assert set(threading.enumerate()) <= before
        fence.notify(told.set)
        (thread,) = set(threading.enumerate()) - before
        assert thread.name == f"asyncmem {device.name} fences"
        let_go()
        assert told.wait(60)
        del device, fence
        gc.collect()
        thread.join(60)
        assert not thread.is_alive()

    def test_that_close_a_device_wait_for_its_work(self, kit: Kit) -> None:
        """Also for work that nobody waits for."""
        device = kit.open()
        let_go = kit.hold(device.default_stream.queue)
        closing = threading.Thread(target=device.close)
        closing.start()
        closing.join(0.05)
        assert closing.is_alive()
        let_go()
        closing.join(60)
        assert not closing.is_alive()

    def test_of_a_lost_device_end_too(self, kit: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
        """Closing it is not refused: there is nothing left to wait for."""
        before, device, told = set(threading.enumerate()), kit.open(), threading.Event()
        device.record_all().notify(told.set)
        assert told.wait(60)

        def lost(*_: object, **__: object) -> None:
            raise DeviceError("record", code=-36, code_name="LOST")

        for work in (device._meeting, device.default_stream.work):
            monkeypatch.setattr(work, "record", lost)
        device.close()
        assert set(threading.enumerate()) <= before

    def test_do_not_hold_up_the_end_of_the_program(self, kit: Kit) -> None:
        """Even while somebody waits for work that never ends."""
        code = f"{kit.opening}device.default_stream.record().notify(print)\n"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


class Failing(PolledFence):
    """A fence that fails once it is let go."""

    def __init__(self, stream: Stream) -> None:
        super().__init__(stream.device._poller)  # type: ignore[attr-defined]  # both devices have one
        self.failed = False

    def done(self) -> bool:
        if self.failed:
            raise DeviceError("work", code=-1, code_name="FAILED")
        return False


def test_awaiting_a_fence_behind_work_that_fails_raises(kit: Kit) -> None:
    """Also where it fails while it is awaited."""
    fence = Failing(kit.device.default_stream)

    async def main() -> None:
        asyncio.get_running_loop().call_later(0.001, setattr, fence, "failed", True)
        await asyncio.wait_for(_await(fence), 60)

    with pytest.raises(DeviceError, match="FAILED"):
        asyncio.run(main())
    with pytest.raises(DeviceError, match="FAILED"):
        fence.block()


async def _await(fence: PolledFence) -> None:
    await fence
