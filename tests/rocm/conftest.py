"""The fixtures of `tests/cuda`, for ROCm's devices, and CUDA's driver beside them."""

from collections.abc import Callable, Iterator

import pytest

from tests.cuda.conftest import cards, gpu, kind_of_gpu, pair
from tests.cuda.fake import FakeDriver

__all__ = ["cards", "gpu", "kind_of_gpu", "nvidia", "pair", "vendor"]


@pytest.fixture
def vendor() -> str:
    """All tests here are about ROCm."""
    return "rocm"


@pytest.fixture
def nvidia(find_driver: Callable[[str], FakeDriver | None]) -> Iterator[FakeDriver]:
    """The fake of CUDA's driver in the same process, without a device; with a real one the test is skipped."""
    driver = find_driver("cuda")
    if driver is None:
        pytest.skip("steers the fake CUDA driver")
    driver.reset()
    driver.devices(0)
    yield driver
    driver.devices(0)
