"""CUDA devices on whichever driver there is, and a look at what each test leaves behind."""

import gc
import time
from collections.abc import Iterator

import pytest

from asyncmem.devices import Cuda

from .fake import FakeDriver


@pytest.fixture
def cuda(driver: FakeDriver | None) -> Iterator[Cuda]:
    """Open the first card; afterwards nothing of it is left, and no work was without order."""
    before = {} if driver is None else driver.live()
    device = Cuda(0)
    yield device
    device.close()
    check_nothing_left(driver, before)


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


def check_nothing_left(driver: FakeDriver | None, before: dict[str, int]) -> None:
    """Fail where the driver still holds something of ours, or has seen memory used without order."""
    gc.collect()
    if driver is None:
        return
    driver.release()
    assert driver.violations() == []
    deadline = time.monotonic() + 5
    while driver.live() != before and time.monotonic() < deadline:
        time.sleep(0.001)  # a thread that ends lets go of what it had in hand when it pleases
        gc.collect()
    assert driver.live() == before
