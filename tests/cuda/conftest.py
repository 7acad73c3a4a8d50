"""CUDA devices on whichever driver there is, and a look at what each test leaves behind."""

import time
from collections.abc import Iterator

import pytest

from asyncmem.devices import Cuda

from .fake import FakeDriver
from .leftovers import check_nothing_left


@pytest.fixture
def cuda(driver: FakeDriver | None) -> Iterator[Cuda]:
    """Open the first card; afterwards nothing of it is left, and no work was without order."""
    before = {} if driver is None else driver.live()
    device = Cuda(0)
    yield device
    device.close()
    check_nothing_left(driver, before)


@pytest.fixture
def pair(fake: FakeDriver) -> Iterator[Cuda]:
    """Open the first of two cards of a fresh fake; afterwards nothing is left of it, and no work was without order."""
    fake.reset()
    fake.devices(2)
    device = Cuda(0)
    yield device
    device.close()
    check_nothing_left(fake, {})


class Usage:
    """What the driver has given out since this was made. A real card rounds, and has other uses of its own."""

    def __init__(self, cuda: Cuda, *, slack: int) -> None:
        self._cuda, self._slack = cuda, slack
        self._before = cuda.memory().free

    def reaches(self, nbytes: int) -> bool:
        """Wait until it is so much, or about so much on a real card; pools give memory back when work is done."""
        deadline = time.monotonic() + 5
        while abs(self._before - self._cuda.memory().free - nbytes) > self._slack:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.001)
        return True


@pytest.fixture
def usage(driver: FakeDriver | None, cuda: Cuda) -> Usage:
    """The card's memory in use: to the byte on the fake, within half of 64 MiB on a real card."""
    return Usage(cuda, slack=0 if driver else 32 << 20)


@pytest.fixture
def cards(driver: FakeDriver | None) -> Iterator[tuple[Cuda, Cuda]]:
    """Open two cards; a real machine with one skips the test."""
    before = {} if driver is None else driver.live()
    if driver is not None:
        driver.devices(2)
    first = Cuda(0)
    if driver is None and first.driver.call("cuDeviceGetCount") < 2:
        first.close()
        pytest.skip("needs two cards")
    second = Cuda(1)
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
