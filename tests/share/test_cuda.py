"""Memory of a GPU for other processes: what can be said without a driver that shares any; the rest is for a card."""

import gc
from collections.abc import Iterator

import pytest

from asyncmem import AsyncMemoryPool, BackendUnavailable, share
from asyncmem.devices import Cuda
from asyncmem.devices.gpu.shared import Held, driver_shares
from asyncmem.errors import StaleDescriptor
from asyncmem.share import imports
from tests.cuda.fake import FakeDriver
from tests.cuda.leftovers import check_nothing_left

from .test_share import wait_until

MEMPOOL_SUPPORTED_HANDLE_TYPES = 119

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


@pytest.fixture
def card(fake: FakeDriver) -> Iterator[FakeDriver]:
    """A GPU whose memory can be shared; what this process has opened of others' is closed afterwards."""
    fake.attribute(0, MEMPOOL_SUPPORTED_HANDLE_TYPES, 1)
    yield fake
    for device in imports._gpus.values():
        device.close()
    imports._gpus.clear()


def nothing_shared(card: FakeDriver) -> bool:
    """Whether no pool, none of its memory and none of the streams for it is left."""
    return not {"pools", "pooled", "streams"} & set(card.live())


def share_once(opened: int = 1) -> None:
    """Have a pool whose memory is opened by so many in this process, and close it."""
    with AsyncMemoryPool("cuda:0", share_limit="8 MiB") as pool:
        buffers = [pool.shared.allocate(1 << 20) for _ in range(opened)]
        arrays = [share.attach(share.export(one).descriptor, timeout=30) for one in buffers]
        for array, buffer in zip(arrays, buffers, strict=True):
            array.free()
            buffer.free()


def test_whoever_opens_memory_closes_the_pool_with_its_owner(card: FakeDriver) -> None:
    """With its stream, however many pools there are one after the other, and before their memory goes back."""
    imported = card.calls("cuMemPoolImportFromShareableHandle")
    gc.disable()  # it waits for nobody's garbage
    try:
        for opened in (1, 3, 0):
            share_once(opened)
            wait_until(lambda: nothing_shared(card))
    finally:
        gc.enable()
    assert card.calls("cuMemPoolImportFromShareableHandle") == imported + 2
    assert card.violations() == []


@pytest.mark.parametrize("call", ["cuMemPoolImportFromShareableHandle", "cuMemPoolImportPointer"])
def test_what_the_driver_does_not_open_at_first_is_opened_later(card: FakeDriver, call: str) -> None:
    """Whoever asks first has an error, and the next ask anew."""
    with AsyncMemoryPool("cuda:0", share_limit="8 MiB") as pool, pool.shared.allocate(1 << 20) as buffer:
        card.fail(call)
        with pytest.raises(StaleDescriptor, match="gave no memory"):
            share.attach(share.export(buffer).descriptor, timeout=30)
        share.attach(share.export(buffer).descriptor, timeout=30).free()
    wait_until(lambda: nothing_shared(card))
    assert card.violations() == []


def test_what_was_never_opened_is_not_waited_for(card: FakeDriver) -> None:
    """Its owner has the memory back when it closes the pool, although nobody closes what could not be opened."""
    with AsyncMemoryPool("cuda:0", share_limit="8 MiB") as pool, pool.shared.allocate(1 << 20) as buffer:
        card.fail("cuMemPoolImportPointer")
        with pytest.raises(StaleDescriptor, match="gave no memory"):
            share.attach(share.export(buffer).descriptor, timeout=30)
    wait_until(lambda: nothing_shared(card))
