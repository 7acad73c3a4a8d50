"""GPUs on whichever driver there is, CUDA's or a test's vendor's, and a look at what each test leaves behind."""

import time
from collections.abc import Iterator

import pytest

from asyncmem.devices import Cuda, Rocm
from asyncmem.devices.gpu.device import Gpu

from .fake import FakeDriver
from .leftovers import check_nothing_left
from .vendors import Kinds


@pytest.fixture
def kind_of_gpu(vendor: str) -> Kinds:
    """The class of the vendor's devices."""
    return {"cuda": Cuda, "rocm": Rocm}[vendor]


@pytest.fixture
def gpu(driver: FakeDriver | None, kind_of_gpu: Kinds) -> Iterator[Gpu]:
    """Open the first card; afterwards nothing of it is left, and no work was without order."""
    before = {} if driver is None else driver.live()
    device = kind_of_gpu(0)
    yield device
    device.close()
    check_nothing_left(driver, before)


@pytest.fixture
def cuda(gpu: Gpu) -> Cuda:
    """The same, for tests that are about CUDA alone."""
    assert isinstance(gpu, Cuda)
    return gpu


@pytest.fixture
def pair(fake: FakeDriver, kind_of_gpu: Kinds) -> Iterator[Gpu]:
    """Open the first of two cards of a fresh fake; afterwards nothing is left of it, and no work was without order."""
    fake.reset()
    fake.devices(2)
    device = kind_of_gpu(0)
    yield device
    device.close()
    check_nothing_left(fake, {})


class Usage:
    """What the driver has given out since this was made. A real card rounds, and has other uses of its own."""

    def __init__(self, gpu: Gpu, *, slack: int) -> None:
        self._gpu, self._slack = gpu, slack
        self._before = gpu.memory().free

    def reaches(self, nbytes: int) -> bool:
        """Wait until it is so much, or about so much on a real card; pools give memory back when work is done."""
        deadline = time.monotonic() + 5
        while abs(self._before - self._gpu.memory().free - nbytes) > self._slack:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.001)
        return True


@pytest.fixture
def usage(driver: FakeDriver | None, gpu: Gpu) -> Usage:
    """The card's memory in use: to the byte on the fake, within half of 64 MiB on a real card."""
    return Usage(gpu, slack=0 if driver else 32 << 20)


@pytest.fixture
def cards(driver: FakeDriver | None, kind_of_gpu: Kinds) -> Iterator[tuple[Gpu, Gpu]]:
    """Open two cards; a real machine with one skips the test."""
    before = {} if driver is None else driver.live()
    if driver is not None:
        driver.devices(2)
    first = kind_of_gpu(0)
    if driver is None and first.driver.call("cuDeviceGetCount") < 2:
        first.close()
        pytest.skip("needs two cards")
    second = kind_of_gpu(1)
    yield first, second
    second.close()
    first.close()
    check_nothing_left(driver, before)


@pytest.fixture
def spotless(fake: FakeDriver) -> Iterator[FakeDriver]:
    """See that nothing is left of a test that opens its devices by itself."""
    before = fake.live()
    yield fake
    check_nothing_left(fake, before)
