"""Sharing of GPUs, over a stand-in for the driver."""

import pytest

from asyncmem.devices import Cuda
from tests.cuda.fake import FakeDriver

pytestmark = [pytest.mark.fake_only, pytest.mark.may_block]


def test_a_gpu_has_one_identity_in_all_processes(fake: FakeDriver) -> None:
    """It is known by its UUID, because each process may number the GPUs in its own way."""
    fake.devices(2)
    identities = []
    for index in (0, 1, 0):
        device = Cuda(index)
        identities.append(device.identity)
        device.close()
    assert identities[0] == identities[2] != identities[1]
