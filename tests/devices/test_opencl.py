"""What is special about OpenCL: other people's queues and kernels, memory that nobody else counts, errors by name."""

import asyncio
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import pytest

from asyncmem import AsyncMemoryPool, BackendUnavailable, DeviceError, InvalidRequest, OutOfMemoryError
from asyncmem.devices import Host, OpenCL, OpenCLFence, Stream, device
from asyncmem.devices.host_memory import PAGE
from asyncmem.devices.opencl.driver import SharedMemory, find_devices
from tests.processor import build

if TYPE_CHECKING:
    import pyopencl as cl

MIB = 1 << 20

SOURCE = """
__kernel void twice(__global int *x) { x[get_global_id(0)] *= 2; }

__kernel void turn(__global uint *x, uint rounds) {
    uint value = x[0];
    for (uint i = 0; i < rounds; i++) value = value * 1664525u + 1013904223u ^ value >> 7;
    x[0] = value;
}
"""


@pytest.fixture(scope="module")
def built() -> "dict[object, cl.Program]":
    return {}


@pytest.fixture
def program(opencl: OpenCL, built: "dict[object, cl.Program]") -> "cl.Program":
    """All devices of a process share a context, so the kernels are compiled once."""
    if opencl.context not in built:
        built[opencl.context] = build(opencl, SOURCE)
    return built[opencl.context]


@pytest.fixture
def other(opencl: OpenCL) -> Iterator[OpenCL]:
    """A second object for the same device."""
    device = OpenCL(opencl.index)
    yield device
    device.close()


@pytest.fixture
def memory(opencl: OpenCL, monkeypatch: pytest.MonkeyPatch) -> SharedMemory:
    """The device's memory as if it were a card's own; what a test sets goes back."""
    memory = opencl.physical.memory
    for name in ("total", "most"):
        monkeypatch.setattr(memory, name, getattr(memory, name))
    monkeypatch.setattr(memory, "_on_host", False)
    return memory


class TestKernels:
    @pytest.mark.asyncio
    async def test_work_on_buffers_of_a_pool(self, opencl: OpenCL, program: "cl.Program") -> None:
        """In the order of the buffer's stream, beside the pool's own copies."""
        twice = opencl.driver.cl.Kernel(program, "twice")
        async with AsyncMemoryPool(opencl, limit="8 MiB") as pool:
            stream = opencl.create_stream()
            source, back = np.arange(1000, dtype=np.int32), np.zeros(1000, np.int32)
            with await pool.allocate_async(source.nbytes, stream=stream) as buffer:
                await buffer.copy_from(source)
                twice(stream.queue, source.shape, None, opencl.pointer(buffer))
                await buffer.copy_to(back)
            assert (back == 2 * source).all()

    @pytest.mark.asyncio
    async def test_work_on_arrays_and_through_buffers_of_opencl(self, opencl: OpenCL, program: "cl.Program") -> None:
        """An array begins within its buffer; libraries that know no addresses get a `pyopencl.Buffer`."""
        twice = opencl.driver.cl.Kernel(program, "twice")
        async with AsyncMemoryPool(opencl, limit="8 MiB") as pool:
            with await pool.empty_batch([(64,), (64,)], "int32") as batch:
                queue = opencl.default_stream.queue
                opencl.fill(batch.buffer.address, batch.buffer.nbytes, 1, opencl.default_stream)
                pointer = opencl.pointer(batch[1])
                twice(queue, (64,), None, pointer)
                twice(queue, (64,), None, pointer.as_buffer(opencl.context))
                back = np.zeros(batch.buffer.nbytes // 4, np.int32)
                await batch.buffer.copy_to(back)
                begin = (batch[1].address - batch.buffer.address) // 4
                assert set(back[begin : begin + 64]) == {4 * 0x01010101}
                assert set(back[:begin]) == {0x01010101}

    @pytest.mark.asyncio
    async def test_leave_the_loop_alone_while_a_copy_is_awaited(self, opencl: OpenCL, program: "cl.Program") -> None:
        """The copy behind a kernel is submitted while that runs, and others have their turns until it is done."""
        cl, queue = opencl.driver.cl, opencl.default_stream.queue
        turn = cl.Kernel(program, "turn")
        async with AsyncMemoryPool(opencl, limit="8 MiB") as pool:
            back = np.zeros(1024, np.uint8)
            with await pool.allocate_async(back.nbytes) as buffer:

                async def count_turns() -> int:
                    """Let others run while a copy waits for a gate and then for 50 ms of work."""
                    gate, turns = cl.UserEvent(opencl.context), 0
                    opencl.fill(buffer.address, buffer.nbytes, 1, opencl.default_stream)
                    cl.enqueue_barrier(queue, wait_for=[gate])
                    turn(queue, (1,), None, opencl.pointer(buffer), np.uint32(20_000_000))
                    behind = opencl.default_stream.record()
                    copy = asyncio.ensure_future(_awaited(buffer.copy_to(back)))
                    await asyncio.sleep(0.001)
                    assert not copy.done()
                    gate.set_status(cl.command_execution_status.COMPLETE)
                    while not behind.done():
                        turns += 1
                        await asyncio.sleep(0.001)
                    await copy
                    assert set(back[4:]) == {1}
                    return turns

                # A machine that is busy may give this process no turn within 50 ms; one that waits has never any.
                assert any([await count_turns() >= 3 for _ in range(5)])


async def _awaited(copy: object) -> None:
    await copy  # type: ignore[misc]  # any awaitable


class TestQueues:
    def test_without_order_are_refused(self, opencl: OpenCL) -> None:
        """Nothing is behind anything in them."""
        cl = opencl.driver.cl
        chaos = cl.command_queue_properties.OUT_OF_ORDER_EXEC_MODE_ENABLE
        with pytest.raises(InvalidRequest, match="in order"):
            opencl.stream_of(cl.CommandQueue(opencl.context, properties=chaos))

    def test_of_another_context_are_refused(self, opencl: OpenCL) -> None:
        """Addresses mean nothing there."""
        cl = opencl.driver.cl
        with pytest.raises(InvalidRequest, match="context"):
            opencl.stream_of(cl.CommandQueue(cl.Context([opencl.physical.device])))


class TestMemory:
    def test_is_counted_here(self, opencl: OpenCL, memory: SharedMemory) -> None:
        """More than there is, is refused, whoever has the rest; what went back can be had again."""
        memory.total = memory.taken + 100 * MIB
        segment = opencl.allocate_segment(60 * MIB - PAGE)
        with pytest.raises(OutOfMemoryError) as refused:
            opencl.allocate_segment(41 * MIB)
        assert (refused.value.asked, refused.value.facts.device_free) == (41 * MIB, 40 * MIB)
        opencl.free_segment(segment)
        opencl.free_segment(opencl.allocate_segment(100 * MIB - PAGE))

    def test_of_the_host_is_no_more_than_is_free_there(self, memory: SharedMemory) -> None:
        """Others use it, too."""
        memory.total, memory._on_host = 1 << 60, True
        assert memory.free() <= Host().capacity

    def test_is_counted_together_for_one_device(self, opencl: OpenCL, other: OpenCL, memory: SharedMemory) -> None:
        """PoCL would give it out twice."""
        memory.total = memory.taken + 64 * MIB
        segment = opencl.allocate_segment(40 * MIB)
        with pytest.raises(OutOfMemoryError):
            other.allocate_segment(40 * MIB)
        assert other.memory().free < 24 * MIB
        opencl.free_segment(segment)
        other.free_segment(other.allocate_segment(40 * MIB))

    def test_in_one_piece_is_what_the_driver_gives_out(self, opencl: OpenCL, memory: SharedMemory) -> None:
        """The error says how much that is."""
        memory.most = 8 * MIB
        with pytest.raises(OutOfMemoryError, match="at most 8 MiB in one piece"):
            opencl.allocate_segment(8 * MIB)
        opencl.free_segment(opencl.allocate_segment(7 * MIB))

    def test_that_the_driver_refuses_is_out_of_memory(self, opencl: OpenCL, memory: SharedMemory) -> None:
        """Where it does, after all; and nothing is counted then."""
        memory.total = memory.most = 1 << 60
        taken = memory.taken
        with pytest.raises(OutOfMemoryError):
            opencl.allocate_segment(1 << 46)
        assert memory.taken == taken

    def test_of_the_host_is_copied_at_once_by_the_processor_and_where_it_is_pinned(
        self, opencl: OpenCL, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A GPU may have to fetch other memory by itself, while its caller waits."""
        pinned = opencl.pinned()
        segment = pinned.allocate_segment(MIB)
        from asyncmem.devices.host_memory import bytes_at

        locked, loose = bytes_at(segment.address, MIB).data, memoryview(bytearray(8))
        assert not opencl.copy_holds_up(loose)
        monkeypatch.setattr(opencl, "is_processor", False)
        assert opencl.copy_holds_up(loose)
        assert not opencl.copy_holds_up(locked)
        assert not opencl.copy_holds_up(memoryview(b""))
        pinned.free_segment(segment)

    @pytest.mark.asyncio
    async def test_of_the_host_is_copied_by_a_thread_of_the_pool_where_that_may_take_long(
        self, opencl: OpenCL, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """As on a GPU; what is pinned needs none."""
        monkeypatch.setattr(opencl, "is_processor", False)
        callers: list[int] = []
        copy_in = opencl.copy_in

        def noted(address: int, source: memoryview, stream: Stream) -> None:
            callers.append(threading.get_ident())
            copy_in(address, source, stream)

        monkeypatch.setattr(opencl, "copy_in", noted)
        async with AsyncMemoryPool(opencl, limit="8 MiB") as pool, pool.allocate_async(1000) as buffer:
            back = np.zeros(1000, np.uint8)
            await buffer.copy_from(np.full(1000, 3, np.uint8))
            await buffer.copy_to(back)
            assert set(back) == {3}
            async with pool.pinned.allocate_async(1000) as staging:
                np.asarray(staging)[:] = 4
                await buffer.copy_from(staging)
            await buffer.copy_to(back)
            assert set(back) == {4}
        here = threading.get_ident()
        assert [caller == here for caller in callers] == [False, True]


class TestErrors:
    def test_have_the_drivers_code_and_its_name(self, opencl: OpenCL) -> None:
        """And the function that failed."""
        with pytest.raises(DeviceError) as caught:
            opencl.driver.call(opencl.driver.cl.SVMAllocation, opencl.context, MIB, 3, 0)
        assert (caught.value.call, caught.value.device) == ("clSVMAlloc", "opencl:0")
        assert caught.value.code < 0
        assert caught.value.code_name.startswith("CL_")

    def test_of_work_are_those_of_its_fences(self, opencl: OpenCL) -> None:
        """A fence behind work that has failed is never reached: it says so, and nobody waits for ever."""

        class Failed:
            command_execution_status = -14  # what others get that waited for it

        fence = OpenCLFence(opencl.default_stream.work, Failed())  # type: ignore[arg-type]
        told = threading.Event()
        fence.notify(told.set)
        assert told.is_set()
        for ask in (fence.done, fence.block):
            with pytest.raises(DeviceError, match="CL_EXEC_STATUS_ERROR_FOR_EVENTS_IN_WAIT_LIST"):
                ask()

    def test_say_what_to_install_for_the_package(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """It is an extra."""
        monkeypatch.setitem(sys.modules, "pyopencl", None)
        with pytest.raises(BackendUnavailable, match=r"asyncmem\[opencl\]"):
            device("opencl")

    @pytest.mark.usefixtures("opencl")
    def test_say_what_there_is_when_a_number_is_too_high(self) -> None:
        """Nobody has so many devices."""
        with pytest.raises(BackendUnavailable, match="opencl:0") as caught:
            device("opencl:99")
        assert "asyncmem[pocl]" in caught.value.install

    @pytest.mark.usefixtures("opencl")
    def test_say_what_to_install_where_there_is_no_driver(self) -> None:
        """The loader finds none in a folder that is not there."""
        code = (
            "import os; os.environ['OCL_ICD_VENDORS'] = '/nowhere'\n"
            "from asyncmem.devices import device\n"
            "try: device('opencl')\n"
            "except Exception as error: print(type(error).__name__, error)"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert done.stdout.startswith("BackendUnavailable")
        assert "asyncmem[pocl]" in done.stdout

    def test_do_not_depend_on_the_order_of_the_drivers(self, opencl: OpenCL, monkeypatch: pytest.MonkeyPatch) -> None:
        """Processors are the last devices, so that the first is the best."""

        class Graphics:
            type = opencl.driver.cl.device_type.GPU

        class Platform:
            def __init__(self, *found: object) -> None:
                self.get_devices = lambda: list(found)

        processor, graphics = opencl.physical.device, Graphics()
        monkeypatch.setattr(opencl.driver.cl, "get_platforms", lambda: [Platform(processor), Platform(graphics)])
        assert find_devices("opencl") == [graphics, processor]

    def test_say_that_a_device_has_no_shared_memory(self, opencl: OpenCL, monkeypatch: pytest.MonkeyPatch) -> None:
        """Those of OpenCL 1 have not."""
        from asyncmem.devices.opencl import driver

        monkeypatch.setattr(driver, "shares_memory", lambda _: False)
        with pytest.raises(BackendUnavailable, match="no shared virtual memory"):
            OpenCL(opencl.index)
