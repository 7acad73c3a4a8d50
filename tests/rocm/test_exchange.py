"""Memory of a ROCm device in the hands of other libraries, and theirs in ours: DLPack, and array interfaces."""

from collections.abc import Iterator
from typing import Any

import pytest

import asyncmem
from asyncmem import Array, AsyncMemoryPool
from asyncmem.devices import Rocm
from asyncmem.errors import InvalidRequest
from tests.cuda.fake import FakeDriver

pytestmark = pytest.mark.fake_only

MIB = 1 << 20


@pytest.fixture
def pool(request: pytest.FixtureRequest, gpu: Rocm) -> Iterator[AsyncMemoryPool]:
    with AsyncMemoryPool(gpu, limit=16 * MIB, segment_size=8 * MIB, min_free=0) as pool:
        yield pool
    request.node.funcargs.clear()  # a pool knows its streams, and would be kept until the last look at what is left


class Producer:
    """Another library with ROCm memory, which it lends by DLPack, and notes what it is asked."""

    def __init__(self, array: Array) -> None:
        self.array = array
        self.asked: list[object] = []

    def __dlpack__(self, **asked: Any) -> object:
        self.asked.append(asked["stream"])
        return self.array.__dlpack__(**asked)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.array.__dlpack_device__()


def test_dlpack_names_it_as_rocms(gpu: Rocm, pool: AsyncMemoryPool) -> None:
    """And its page-locked memory too; the default stream is 0 there, while 1 and 2 mean nothing."""
    assert gpu.pinned().dlpack_device == (11, 0)
    with pool.allocate(MIB) as buffer:
        array = buffer.view()
        assert array.__dlpack_device__() == (10, 0)
        theirs = gpu.create_stream()
        for stream in (None, 0, -1, theirs.handle):
            array.__dlpack__(stream=stream)
        for stream in (1, 2, -2):
            with pytest.raises(InvalidRequest, match="None or 0"):
                array.__dlpack__(stream=stream)


def test_an_owner_is_told_the_default_stream_by_0(gpu: Rocm, pool: AsyncMemoryPool) -> None:
    """Any other by its handle; its memory is found on the right device."""
    stream = gpu.create_stream()
    with pool.allocate(MIB) as buffer:
        producer = Producer(buffer.view())
        for home, number in ((gpu.default_stream, 0), (stream, stream.handle)):
            taken = asyncmem.asarray(producer, stream=home)
            assert taken.buffer.device is gpu
            assert taken.buffer.address == buffer.address
            taken.buffer.free()
            assert producer.asked.pop() == number


def test_an_array_interface_is_found_on_its_device(
    gpu: Rocm, pool: AsyncMemoryPool, nvidia: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Libraries for ROCm use CUDA's, which does not say whose memory it is: the drivers are asked."""
    monkeypatch.setattr("asyncmem.exchange._devices", {(10, 0): gpu})
    monkeypatch.setattr("asyncmem.exchange._cores", {})

    class Theirs:
        def __init__(self, array: Array) -> None:
            self.__cuda_array_interface__ = array.__cuda_array_interface__

    for cards in (0, 1):
        nvidia.devices(cards)
        with pool.allocate(MIB) as buffer:
            taken = asyncmem.asarray(Theirs(buffer.view("float32")))
            assert (taken.buffer.device, taken.buffer.address) == (gpu, buffer.address)
            taken.buffer.free()
