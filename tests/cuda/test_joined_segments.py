"""Segments that lie side by side become one, in the order of the stream that has freed what was in them."""

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from asyncmem import AsyncMemoryPool, Buffer, DeviceError
from asyncmem.devices import Cuda, Stream
from asyncmem.pool.open_pool import OpenPool
from tests.conftest import close_pools

from .fake import FakeDriver

pytestmark = pytest.mark.fake_only

MIB = 1 << 20

MakePool = Callable[[], AsyncMemoryPool]


@pytest.fixture
def make_pool(request: pytest.FixtureRequest, cuda: Cuda) -> Iterator[MakePool]:
    made: list[AsyncMemoryPool] = []

    def make() -> AsyncMemoryPool:
        settings: dict[str, Any] = {"limit": 64 * MIB, "segment_size": 8 * MIB, "min_free": 0, "stall_after": None}
        made.append(AsyncMemoryPool(cuda, segments="stream_ordered", **settings))
        return made[-1]

    yield make
    for pool in made:
        pool.check()
    del pool
    close_pools(request, made)  # keeps none: pools know their streams


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Join nothing by the clock."""
    monkeypatch.setattr(OpenPool, "beat", lambda _: None)


def free_two(pool: AsyncMemoryPool, stream: Stream) -> int:
    """Use two segments behind a stream that stands still, and free what is in them; return where they are."""
    low, high = pool.allocate(8 * MIB, stream=stream), pool.allocate(8 * MIB, stream=stream)
    address = low.address
    assert high.address == address + 8 * MIB
    for buffer in (low, high):
        pool.device.fill(buffer.address, buffer.nbytes, 1, stream)
        buffer.free()
    return address


def read(buffer: Buffer, stream: Stream) -> bytes:
    """Return what a buffer holds once the stream's work is done."""
    back = bytearray(buffer.nbytes)
    buffer.device.copy_out(memoryview(back), buffer.address, stream)
    stream.synchronize_blocking()
    return bytes(back)


@pytest.mark.usefixtures("asked")
def test_two_serve_a_request_as_large_as_both(fake: FakeDriver, make_pool: MakePool) -> None:
    """Nothing is waited for, no more is taken of the driver, and the bytes are those that were written last."""
    pool = make_pool()
    stream = pool.device.create_stream("own")
    fake.hold(stream.handle)
    address = free_two(pool, stream)
    both = pool.allocate(16 * MIB, stream=stream)
    assert both.address == address
    stats = pool.stats()
    assert (stats.reserved_bytes, stats.segments) == (16 * MIB, 1)
    pool.device.fill(both.address, both.nbytes, 2, stream)
    fake.release()
    assert read(both, stream) == bytes([2]) * (16 * MIB)
    both.free()


@pytest.mark.usefixtures("asked")
def test_the_last_is_extended_by_what_a_request_lacks(fake: FakeDriver, make_pool: MakePool) -> None:
    """The driver gives the difference behind it."""
    pool = make_pool()
    stream = pool.device.create_stream("own")
    fake.hold(stream.handle)
    address = free_two(pool, stream)
    larger = pool.allocate(22 * MIB, stream=stream)
    assert (larger.address, pool.stats().reserved_bytes) == (address, 22 * MIB)
    fake.release()
    larger.free()


@pytest.mark.usefixtures("asked")
def test_another_stream_does_not_get_them_before_they_are_done(fake: FakeDriver, make_pool: MakePool) -> None:
    """It gets memory of its own instead."""
    pool = make_pool()
    stream = pool.device.create_stream("own")
    other = pool.device.create_stream("other")
    fake.hold(stream.handle)
    address = free_two(pool, stream)
    with pool.allocate(16 * MIB, stream=other) as buffer:
        assert buffer.address != address
        pool.device.fill(buffer.address, buffer.nbytes, 3, other)
        other.synchronize_blocking()
    fake.release()


def test_they_are_joined_while_nobody_asks(fake: FakeDriver, make_pool: MakePool) -> None:
    """By the worker, so that the next larger request asks nothing of the driver."""
    pool = make_pool()
    stream = pool.device.create_stream("own")
    fake.hold(stream.handle)
    free_two(pool, stream)
    until = time.monotonic() + 60
    while pool.stats().segments != 1 and time.monotonic() < until:  # none while the driver makes one of two
        time.sleep(0.001)
    assert pool.stats().segments == 1
    made = fake.counts()["cuMemAllocFromPoolAsync"]
    pool.allocate(16 * MIB, stream=stream).free()
    assert (fake.counts()["cuMemAllocFromPoolAsync"], pool.stats().reserved_bytes) == (made, 16 * MIB)
    fake.release()


@pytest.mark.usefixtures("asked")
def test_a_large_request_has_a_segment_of_its_own_cut_from_the_last(fake: FakeDriver, make_pool: MakePool) -> None:
    """Nothing is waited for, and what it leaves is extended by what the next one lacks, with the bytes written last."""
    pool = make_pool()
    stream = pool.device.create_stream("own")
    fake.hold(stream.handle)
    whole = pool.allocate(24 * MIB, stream=stream)
    address = whole.address
    pool.device.fill(address, whole.nbytes, 1, stream)
    whole.free()
    part = pool.allocate(10 * MIB, stream=stream)
    pool.device.fill(part.address, part.nbytes, 2, stream)
    assert (part.address, pool.stats().reserved_bytes, pool.stats().segments) == (address, 24 * MIB, 2)
    rest = pool.allocate(20 * MIB, stream=stream)
    assert (rest.address, pool.stats().reserved_bytes) == (address + 10 * MIB, 30 * MIB)
    pool.device.fill(rest.address, rest.nbytes, 3, stream)
    fake.release()
    assert read(part, stream) == bytes([2]) * (10 * MIB)
    part.free()
    rest.free()


@pytest.mark.usefixtures("asked")
@pytest.mark.parametrize("code", [1, 2], ids=["failed", "out of memory"])
def test_a_rest_that_does_not_come_stays_with_the_driver(fake: FakeDriver, make_pool: MakePool, code: int) -> None:
    """The request has its part, and the rest counts as reserved no more; the next growth takes it from there."""
    pool = make_pool()
    stream = pool.device.create_stream("own")
    whole = pool.allocate(24 * MIB, stream=stream)
    address = whole.address
    whole.free()
    fake.fail("cuMemAllocFromPoolAsync", 2, code=code)
    with pool.allocate(10 * MIB, stream=stream) as part:
        assert (part.address, pool.stats().reserved_bytes) == (address, 10 * MIB)
        with pool.allocate(14 * MIB, stream=stream) as rest:
            assert (rest.address, pool.stats().reserved_bytes) == (address + 10 * MIB, 24 * MIB)


@pytest.mark.usefixtures("asked")
@pytest.mark.parametrize(("call", "nth"), [("cuMemFreeAsync", 1), ("cuMemAllocFromPoolAsync", 1)])
def test_a_driver_that_fails_to_cut_leaves_nothing_behind(
    fake: FakeDriver, make_pool: MakePool, call: str, nth: int
) -> None:
    """Whoever asked is told, and the next one is served."""
    pool = make_pool()
    stream = pool.device.create_stream("own")
    pool.allocate(24 * MIB, stream=stream).free()
    fake.fail(call, nth, code=1)
    with pytest.raises(DeviceError, match=call):
        pool.allocate(10 * MIB, stream=stream)
    pool.check()
    with pool.allocate(10 * MIB, stream=stream) as buffer:
        assert buffer.nbytes == 10 * MIB


@pytest.mark.usefixtures("asked")
def test_a_stream_that_cannot_be_asked_loses_no_segment(fake: FakeDriver, make_pool: MakePool) -> None:
    """Neither whether it is captured can be asked, nor another be had instead: what was to be joined serves on."""
    pool = make_pool()
    stream = pool.device.create_stream("own")
    address = free_two(pool, stream)
    fake.fail("cuStreamIsCapturing", 3)  # the request asks twice before
    fake.fail("cuStreamCreate", code=999)
    with pytest.raises(DeviceError, match="cuStreamCreate"):
        pool.allocate(16 * MIB, stream=stream)
    assert pool.stats().reserved_bytes == 16 * MIB
    with pool.allocate(64 * MIB, stream=stream) as whole:
        assert whole.address == address


@pytest.mark.usefixtures("asked")
@pytest.mark.parametrize(
    ("call", "nth"), [("cuMemFreeAsync", 1), ("cuMemFreeAsync", 2), ("cuMemAllocFromPoolAsync", 1)]
)
def test_a_driver_that_fails_half_way_leaves_nothing_behind(
    fake: FakeDriver, make_pool: MakePool, call: str, nth: int
) -> None:
    """Whoever asked is told, what did not go back serves on, and the pool closes with all of it."""
    pool = make_pool()
    stream = pool.device.create_stream("own")
    free_two(pool, stream)
    fake.fail(call, nth, code=1)
    with pytest.raises(DeviceError, match=call):
        pool.allocate(16 * MIB, stream=stream)
    pool.check()
    with pool.allocate(16 * MIB, stream=stream) as buffer:
        assert buffer.nbytes == 16 * MIB
