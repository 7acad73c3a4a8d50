"""The fake driver refuses what a driver refuses, moves bytes for real, and tells of work without order."""

import pytest
from cuda.bindings import driver as cuda

from .fake import FakeDriver

pytestmark = pytest.mark.fake_only


def test_answers(fake: FakeDriver) -> None:
    """It is the driver of this process."""
    assert cuda.cuInit(0) == (cuda.CUresult.CUDA_SUCCESS,)
    assert fake.calls("cuInit") == 1
