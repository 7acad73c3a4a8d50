"""Memory of a GPU for other processes: what can be said without a driver that shares any; the rest is for a card."""

import gc

import pytest

from asyncmem import AsyncMemoryPool, BackendUnavailable
from asyncmem.devices import Cuda
from asyncmem.devices.gpu.shared import Held, driver_shares
from tests.cuda.fake import FakeDriver
from tests.cuda.leftovers import check_nothing_left

cuda = pytest.importorskip("cuda")
pytest.importorskip("cuda.core", reason="cuda.core is not installed")

pytestmark = [pytest.mark.fake_only, pytest.mark.may_block]


def test_a_gpu_has_one_identity_in_all_processes(fake: FakeDriver) -> None:
    """It is known by its UUID, because each process may number the GPUs in its own way."""
    fake.devices(2)
    with_numbers = {}
    for index in (0, 1):
        device = Cuda(index)
        with_numbers[device.identity] = index
        device.close()
    assert {identity: Cuda.with_identity(identity) for identity in with_numbers} == with_numbers
    assert len(with_numbers) == 2
    assert Cuda.with_identity("cuda-00") is None


def test_whether_a_gpu_shares_is_known_before_it_is_opened(fake: FakeDriver) -> None:
    """By what the driver says of its pools."""
    fake.devices(2)
    Cuda.interface.start("cuda")
    driver = Cuda.interface("cuda:1")
    assert not driver_shares(driver, 1)
    fake.attribute(1, 119, 9)
    assert driver_shares(driver, 1)
    assert not driver_shares(driver, 0)


def test_a_driver_that_shares_nothing_is_named(fake: FakeDriver) -> None:
    """Where the driver has no such pools, the error says who refused what, and the pool goes on."""
    assert fake is not None
    with AsyncMemoryPool("cuda:0", limit="64 MiB") as pool:
        with pytest.raises(BackendUnavailable, match="shared CUDA memory"):
            _ = pool.shared
        pool.allocate(1000).free()


def test_memory_goes_back_before_the_stream_that_it_is_behind_has_gone(fake: FakeDriver) -> None:
    """Also where the collector finds both at once: a driver follows the handle of a stream that was destroyed."""
    fake.devices(1)
    before = fake.live()
    device = Cuda(0)
    stream = device.create_stream("shared")
    with device.context.entered():
        resource = cuda.core.DeviceMemoryResource(0, cuda.core.DeviceMemoryResourceOptions())
        memory = resource.allocate(1 << 20, stream=cuda.core.Stream.from_handle(stream.handle))
    freed = fake.calls("cuMemFreeAsync")
    cycle: list[object] = [Held(memory, stream, device), stream]
    cycle.append(cycle)
    del stream, memory, resource, cycle
    gc.collect()
    assert fake.calls("cuMemFreeAsync") == freed + 1
    device.close()
    del device
    check_nothing_left(fake, before)
