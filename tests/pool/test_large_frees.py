"""Once streams wait for each other, a large free has a fence of its own: nobody waits for what comes after it."""

import pytest

from asyncmem import AsyncMemoryPool
from asyncmem.devices import Simulated, SimulatedStream
from asyncmem.testing import SteppedPool

from .support import MIB, quick_device

SIZE = 8 * MIB


def pool_of_two(device: Simulated) -> tuple[AsyncMemoryPool, SimulatedStream, SimulatedStream]:
    """Make a pool with room for one large buffer, and two streams."""
    pool = SteppedPool(device, limit=SIZE, segment_size=SIZE, overlap=0)
    return pool, device.create_stream("one"), device.create_stream("other")


def use(pool: AsyncMemoryPool, stream: SimulatedStream, nbytes: int = SIZE, seconds: float = 1.0) -> None:
    """Take memory, work on it, and free it."""
    with pool.allocate(nbytes, stream=stream) as buffer:
        stream.launch(seconds, writes=[buffer])


def fences(pool: AsyncMemoryPool) -> int:
    """Return how many have been recorded."""
    return pool._opened.retire.counts().records


def test_a_taker_waits_for_the_work_before_the_free_and_not_for_what_followed() -> None:
    """The first one that ever waits finds no fence, and waits for all; the next ones do not."""
    device = quick_device()
    pool, one, other = pool_of_two(device)
    with pool:
        use(pool, one)
        one.launch(10.0)
        use(pool, other)
        assert other.record().at == pytest.approx(12.0)  # behind the ten seconds as well
        other.launch(10.0)
        use(pool, one)
        assert one.record().at == pytest.approx(13.0)  # as `other` is done with it at 12
        device.run_until_idle()


@pytest.mark.parametrize("by_name", [True, False])
def test_a_fence_is_recorded_at_each_large_free(by_name: bool) -> None:
    """At a drop as at a free on a stream that is named; the little that is freed beside it waits for the next."""
    device = quick_device()
    pool, one, other = pool_of_two(device)
    with pool:
        use(pool, one)
        assert fences(pool) == 0  # nobody has waited for anybody yet
        use(pool, other)
        before = fences(pool)
        for number in range(1, 4):
            buffer = pool.allocate(SIZE, stream=other)
            buffer.free(stream=other) if by_name else None
            del buffer
            assert fences(pool) == before + number
        pool.allocate(1000, stream=other).free()
        pool.allocate(SIZE // 16, stream=other).free()
        assert fences(pool) == before + 3
        device.run_until_idle()


def test_a_batch_has_one_fence_for_all_that_is_large_in_it() -> None:
    """They are freed together, behind the same work."""
    device = quick_device()
    pool, one, other = pool_of_two(device)
    with pool:
        use(pool, one)
        use(pool, other)
        before = fences(pool)
        pool.allocate_batch([2 * MIB, 3 * MIB], stream=other).result().free()
        assert fences(pool) == before + 1
        device.run_until_idle()


def test_where_nobody_waits_any_more_there_are_none() -> None:
    """A program whose streams no longer wait for each other pays for no fences."""
    device = quick_device()
    pool, one, other = pool_of_two(device)
    with pool:
        use(pool, one)
        use(pool, other)
        for _ in range(4096):
            use(pool, other, seconds=0.0)
        before = fences(pool)
        for _ in range(10):
            use(pool, other, seconds=0.0)
        assert fences(pool) == before
        use(pool, one)  # waits again
        use(pool, one)
        assert fences(pool) >= before + 2
        device.run_until_idle()


def test_a_fence_that_cannot_be_recorded_keeps_nobody_from_freeing() -> None:
    """The free is done all the same, and a later one makes up for it."""
    device = quick_device()
    pool, one, other = pool_of_two(device)
    with pool:
        use(pool, one)
        use(pool, other)
        device.fail("record")
        use(pool, other)
        assert pool.stats().allocated_bytes == 0
        use(pool, one)
        device.run_until_idle()


def test_the_block_whose_fences_lie_furthest_back_is_taken() -> None:
    """Though another one fits as well and lies lower: who takes it waits for less."""
    device = quick_device()
    one, other, taker = (device.create_stream(name) for name in ("one", "other", "taker"))
    with SteppedPool(device, limit=2 * SIZE + MIB, segment_size=2 * SIZE, overlap=0) as pool:
        use(pool, device.default_stream)
        low, high = pool.allocate(SIZE, stream=one), pool.allocate(SIZE, stream=other)
        assert low.address < high.address
        other.launch(1.0, writes=[high])
        high.free()
        with pool.allocate(1000, stream=other) as small:
            small.use_on(one)  # a fence more of that stream's
        one.launch(5.0, writes=[low])
        low.free()
        with pool.allocate(SIZE, stream=taker):
            assert taker.record().at == pytest.approx(2.0)
        device.run_until_idle()
