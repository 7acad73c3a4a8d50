"""Sizes at the doors: ints of one digit, of two, and of more, as CPython holds them."""

import pytest

from asyncmem import AsyncMemoryPool, InvalidRequest
from asyncmem.devices import Simulated

GIB = 1 << 30


@pytest.mark.parametrize("nbytes", [GIB - 1, GIB, GIB + 1, (1 << 32) + 5, (1 << 36) - 1])
def test_large_sizes_come_as_they_were_asked_for(nbytes: int) -> None:
    """A size that begins another digit loses none of its bits, on the way of a hit as on that of a miss."""
    with AsyncMemoryPool(Simulated(1 << 38), limit=1 << 37) as pool:
        for _ in range(3):
            with pool.allocate(nbytes) as buffer:
                assert buffer.nbytes == nbytes
                assert 0 <= pool.stats().allocated_bytes - nbytes < 512


@pytest.mark.parametrize("nbytes", [-1, -GIB, -GIB - 1, -(1 << 60), 1 << 59, 1 << 60, (1 << 60) + 4096, 1 << 64])
def test_sizes_that_cannot_be_are_refused(nbytes: int) -> None:
    """Whatever their number of digits, and however little is left of them in a machine word."""
    with AsyncMemoryPool("simulated") as pool, pytest.raises(InvalidRequest, match="expected 0 to 128 TiB"):
        pool.allocate(nbytes)
