"""Where HIP departs from CUDA: names, contexts, streams, mappings and remembered errors."""

import ctypes
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import asyncmem
from asyncmem.devices import Cuda, Rocm
from asyncmem.devices.rocm import HIP
from asyncmem.errors import DeviceError, InvalidRequest
from tests.cuda.fake import NEWER, FakeDriver
from tests.cuda.leftovers import check_nothing_left

pytestmark = pytest.mark.fake_only

MIB = 1 << 20
SOURCES = Path(asyncmem.__file__).parent / "devices"


@pytest.fixture
def hip(fake: FakeDriver) -> ctypes.CDLL:
    """The runtime as another library of the process calls it."""
    return ctypes.CDLL(str(fake.path))


@pytest.fixture
def bindings(gpu: Rocm) -> Any:
    """hip-python."""
    return gpu.driver._bindings


class TestNames:
    def test_hip_python_has_every_call_that_is_made_by_name(self, bindings: Any) -> None:
        """No hardware would tell of one that is wrong."""
        sources = [*(SOURCES / "gpu").glob("*.py"), SOURCES / "rocm.py"]
        calls = {name for path in sources for name in re.findall(r'"(cu[A-Z]\w+)"', path.read_text())}
        assert len(calls) > 20
        assert [name for name in sorted(calls) if not hasattr(bindings, HIP.symbol(name))] == []

    def test_hip_python_has_every_function_of_the_table(self, bindings: Any) -> None:
        """It declares what the headers declare."""
        sources = [SOURCES / "gpu" / name for name in ("hip.cpp", "table.hpp")]
        if not sources[0].exists():
            pytest.skip("an installed package has no sources of its compiled parts")
        text = "".join(source.read_text() for source in sources)
        names = set(re.findall(r"\bhip[A-Z]\w+", text)) - {"hipStreamGetId"}  # of later versions
        assert len(names) > 20
        assert [name for name in sorted(names) if not hasattr(bindings, name)] == []

    def test_descriptions_are_laid_out_as_compiled_code_has_them(self, gpu: Rocm, bindings: Any) -> None:
        """Sizes and numbers that `table.hpp` and `paging.hpp` are sure of."""
        kinds = (bindings.hipMemAllocationProp, bindings.hipMemAccessDesc, bindings.hipMemPoolProps)
        assert [kind().c_sizeof() for kind in kinds] == [32, 12, 88]
        wish = bindings.hipMemAllocationProp()
        wish.type = bindings.hipMemAllocationType.hipMemAllocationTypePinned
        gpu.driver.locate(wish.location, 3)
        numbers = (ctypes.c_int * 8).from_address(int(wish))
        assert list(numbers[:4]) == [1, 0, 1, 3]
        assert int(bindings.hipMemAccessFlags.hipMemAccessFlagsProtReadWrite) == 3
        assert int(bindings.hipMemoryType.hipMemoryTypeHost) == 1

    def test_errors_are_told_by_hips_names(self, fake: FakeDriver, gpu: Rocm) -> None:
        """Of calls through either way."""
        fake.fail("cuMemGetInfo", 1, 999)
        with pytest.raises(DeviceError, match=r"hipMemGetInfo failed on rocm:0: hipErrorUnknown \(999\)"):
            gpu.memory()
        fake.fail("cuMemAlloc", 1, 719)
        with pytest.raises(DeviceError, match="hipMalloc") as caught:
            gpu.allocate_segment(MIB, "direct")
        assert "AMD_SERIALIZE_KERNEL" in str(caught.value)


class TestDevicesOfThreads:
    def test_a_thread_stays_with_its_device(self, hip: ctypes.CDLL, pair: Rocm) -> None:
        """Whatever is done on another one: HIP has no contexts to put back, but a device for each thread."""
        found = ctypes.c_int(-1)
        assert hip.hipSetDevice(1) == 0
        segment = pair.allocate_segment(MIB)
        pair.fill(segment.address, MIB, 1, pair.default_stream)
        assert pair.record_all().block(10)
        pair.free_segment(segment)
        assert hip.hipGetDevice(ctypes.byref(found)) == 0
        assert found.value == 1
        hip.hipSetDevice(0)

    def test_a_thread_that_has_named_no_device_works_too(self, cards: tuple[Rocm, Rocm]) -> None:
        """It is with device 0, also when something is done on another."""
        _, second = cards
        errors: list[BaseException] = []

        def work() -> None:
            try:
                assert second.create_stream().record().block(10)
            except BaseException as error:  # noqa: BLE001  # shown by the test
                errors.append(error)

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        assert errors == []


class TestStreams:
    def test_the_default_stream_is_named_by_0(self, gpu: Rocm) -> None:
        """Older versions follow 1 into nowhere; the fake refuses it."""
        assert gpu.default_stream.handle == 0
        assert gpu.default_stream.__cuda_stream__() == (0, 0)
        assert gpu.stream_of(1) is gpu.stream_of(0) is gpu.default_stream
        assert gpu.default_stream.record().block(10)
        assert gpu.record_all().block(10)

    def test_a_stream_without_a_number_goes_by_its_handle(self, gpu: Rocm) -> None:
        """One that is gone is told by an error of HIP's own."""
        stream = gpu.create_stream()
        handle = stream.handle
        assert stream.name == f"stream-{handle}"
        assert gpu.stream_of(handle) is stream
        del stream
        with pytest.raises(InvalidRequest, match="live ROCm stream"):
            gpu.stream_of(handle)

    def test_a_later_version_has_numbers(self, fake: FakeDriver) -> None:
        """Then a handle that is used again is another stream."""
        library = fake.path.parent / NEWER / fake.path.name
        program = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parents[1] / "cuda")!r})
import fake
fake.FakeDriver({str(library)!r})
from asyncmem.devices import Rocm
gpu = Rocm()
handle = gpu.context.create_stream()
first = gpu.stream_of(handle)
gpu.context.destroy_stream(handle)
again = gpu.context.create_stream()
print(again == handle, gpu.stream_of(again) is not first)
"""
        environ = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
        done = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, timeout=100, check=True, env=environ
        )
        assert done.stdout == "True True\n"

    def test_captures_are_seen(self, hip: ctypes.CDLL, gpu: Rocm) -> None:
        """And a fence of everything leaves them alone."""
        stream, graph = gpu.create_stream(), ctypes.c_void_p()
        assert hip.hipStreamBeginCapture(ctypes.c_void_p(stream.handle), 2) == 0
        assert stream.capturing()
        with pytest.raises(DeviceError, match="graph"):
            gpu.record_all()
        assert hip.hipStreamEndCapture(ctypes.c_void_p(stream.handle), ctypes.byref(graph)) == 0
        assert not stream.capturing()
        assert hip.hipGraphDestroy(graph) == 0


class TestMappings:
    def test_each_is_a_call_of_its_own(self, fake: FakeDriver, gpu: Rocm) -> None:
        """Some versions take no call for several, or crash at it; the fake refuses it."""
        names = ("cuMemCreate", "cuMemSetAccess", "cuMemUnmap")
        start = gpu.reserve(64 * MIB)
        spans = [(start, 4 * MIB), (start + 4 * MIB, 4 * MIB)]
        before = fake.counts()
        assert gpu.remap([], spans).error is None
        assert gpu.remap(spans, []).error is None
        assert [fake.calls(name) - before.get(name, 0) for name in names] == [2, 2, 2]
        gpu.unreserve(start, 64 * MIB)


class TestPeers:
    def test_a_grant_that_hip_does_not_take_back_hides_no_error(self, fake: FakeDriver, pair: Rocm) -> None:
        """A memory pool's stays where a later one fails, which is what is told; the fake refuses to take it back."""
        peer = Rocm(1)
        segment = pair.allocate_segment(MIB, "stream_ordered")
        start = pair.reserve(64 * MIB)
        pair.remap([], [(start, 4 * MIB)])
        fake.fail("cuMemSetAccess", 1, 999)
        with pytest.raises(DeviceError, match="hipMemSetAccess"):
            pair.grant_access([peer])
        pair.grant_access([peer])
        pair.remap([(start, 4 * MIB)], [])
        pair.unreserve(start, 64 * MIB)
        pair.default_stream.synchronize_blocking()
        pair.free_segment(segment)
        peer.close()


class TestErrors:
    def test_an_error_of_ours_is_left_to_nobody_else(self, fake: FakeDriver, hip: ctypes.CDLL, gpu: Rocm) -> None:
        """HIP remembers a thread's last error, for which other libraries ask after each of their kernels."""
        fake.fail("cuMemGetInfo", 1, 999)
        with pytest.raises(DeviceError):
            gpu.memory()
        assert hip.hipGetLastError() == 0
        assert gpu.copy_holds_up(memoryview(bytearray(16)), into=True)  # HIP takes no bytes with the call
        assert hip.hipGetLastError() == 0
        fake.fail("cuEventRecord", 1, 999)
        with pytest.raises(DeviceError):
            gpu.default_stream.record()
        assert hip.hipGetLastError() == 0


class TestBesideCuda:
    @pytest.fixture
    def cuda(self, nvidia: FakeDriver) -> Iterator[Cuda]:
        """A device of CUDA's, in the same process."""
        nvidia.devices(1)
        device = Cuda()
        yield device
        device.close()
        check_nothing_left(nvidia, {})

    def test_neither_takes_the_others_things(self, gpu: Rocm, cuda: Cuda) -> None:
        """Their numbers look alike and mean something else."""
        assert gpu.context.handle != cuda.context.handle
        for one, other in ((gpu, cuda), (cuda, gpu)):
            with pytest.raises(InvalidRequest, match="fence"):
                one.default_stream.wait(other.default_stream.record())
            with pytest.raises(InvalidRequest, match="peers"):
                one.grant_access([other])
            with pytest.raises(InvalidRequest, match="source_device"):
                one.peer_copy(0, 0, 1, other, one.default_stream)
            with pytest.raises(InvalidRequest, match="stream"):
                one.stream_of(other.default_stream)
            with pytest.raises(InvalidRequest, match="stream"):
                one.stream_of(other.create_stream())

    def test_pools_of_both_work_side_by_side(self, gpu: Rocm, cuda: Cuda) -> None:
        """Each with its own driver's memory, streams and fences."""
        for device in (gpu, cuda):
            with asyncmem.AsyncMemoryPool(device, limit=16 * MIB, segment_size=8 * MIB, min_free=0) as pool:
                stream = device.create_stream()
                for _ in range(4):
                    with pool.allocate(4 * MIB, stream=stream) as buffer:
                        device.fill(buffer.address, buffer.nbytes, 7, stream)
                        stream.synchronize_blocking()
                pool.check()
