"""What is free in a lease is found, whatever streams its pieces wait for: nobody tidies up there but who asks."""

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from asyncmem import AsyncMemoryPool, Lease
from asyncmem.devices import Simulated
from asyncmem.pool.share import Share

MIB = 1 << 20


@pytest.fixture
def device() -> Simulated:
    return Simulated("64 GiB")


@pytest.fixture(params=["lease", "budget"])
def share(request: pytest.FixtureRequest, device: Simulated) -> Iterator[Share]:
    """A lease of two mebibytes, or a budget over all of one."""
    with ExitStack() as stack:
        pool = stack.enter_context(AsyncMemoryPool(device))
        lease: Lease = stack.enter_context(pool.lease(2 * MIB))
        yield lease if request.param == "lease" else lease.budget("part", limit=2 * MIB)
        pool.check()


def leave_two_pieces(device: Simulated, share: Share) -> None:
    """Free two neighbours, of which one waits for another stream too."""
    other = device.create_stream()
    first, second = share.allocate(MIB), share.allocate(MIB)
    second.use_on(other)
    other.launch(0.001, reads=[second])
    first.free()
    second.free()


def test_pieces_that_waited_for_unlike_streams_serve_as_one(device: Simulated, share: Share) -> None:
    """When all is done they hold what is as large as both."""
    leave_two_pieces(device, share)
    device.run_until_idle()
    assert share.allocate(2 * MIB).nbytes == 2 * MIB


def test_pieces_still_in_use_serve_as_one_behind_their_streams(device: Simulated, share: Share) -> None:
    """Before the other stream is done, the taking stream comes behind it; a device that checks says otherwise."""
    leave_two_pieces(device, share)
    whole = share.allocate(2 * MIB)
    device.default_stream.launch(0.001, writes=[whole])
    device.run_until_idle()
