"""The fixtures of `tests/cuda`, for ROCm's devices."""

from tests.cuda.conftest import cards, gpu, kind_of_gpu, pair

__all__ = ["cards", "gpu", "kind_of_gpu", "pair", "vendor"]

import pytest


@pytest.fixture
def vendor() -> str:
    """All tests here are about ROCm."""
    return "rocm"
