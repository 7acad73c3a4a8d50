"""A pool keeps less where memory is short, more again where it is not, and gives back what nobody has a use for."""

import time
from collections.abc import Iterator

import pytest

from asyncmem import AsyncMemoryPool, Buffer, DeviceError
from asyncmem.devices import Simulated
from asyncmem.testing import SteppedPool

from .support import MIB, quick_device

LIMIT = 64 * MIB
SIZE = MIB // 16
MANY = 64
CAP = MANY * SIZE


def pool_of(device: Simulated, **options: object) -> SteppedPool:
    settings = {"limit": LIMIT, "segment_size": 8 * MIB, "stall_after": None, "stream_cache_bytes": CAP, **options}
    settings["shared_cache_bytes"] = 0
    return SteppedPool(device, **settings)  # type: ignore[arg-type]


@pytest.fixture
def pool() -> Iterator[SteppedPool]:
    with pool_of(quick_device(LIMIT)) as pool:
        yield pool


def cached(pool: AsyncMemoryPool) -> int:
    """Return how much stays in caches of many buffers of one size."""
    for _ in range(2):  # once for the cache to learn that this size is in use
        for buffer in [pool.allocate(SIZE) for _ in range(MANY)]:
            buffer.free()
    return in_caches(pool)


def in_caches(pool: AsyncMemoryPool) -> int:
    """Return the bytes of that size that are in caches."""
    return sum(one.nbytes for one in pool._opened.core.blocks() if one.state == "cached" and one.nbytes == SIZE)


def held(pool: AsyncMemoryPool, share: float) -> Buffer:
    """Take a share of the limit."""
    return pool.allocate(int(LIMIT * share))


class TestCaches:
    """What they may keep follows the pressure."""

    def test_they_keep_a_quarter_from_80_percent_until_60(self, pool: SteppedPool) -> None:
        """Between the two all stays as it was, whichever way the pressure goes."""
        assert cached(pool) == CAP
        most = held(pool, 0.65)
        assert cached(pool) == CAP
        more = held(pool, 0.16)
        assert in_caches(pool) <= CAP // 4
        assert cached(pool) == CAP // 4
        more.free()
        assert cached(pool) == CAP // 4
        most.free()
        assert cached(pool) == CAP

    def test_they_keep_all_where_a_pool_is_not_to_adapt(self) -> None:
        """`adaptive=False` leaves them alone."""
        with pool_of(quick_device(LIMIT), adaptive=False) as pool:
            most = held(pool, 0.85)
            assert cached(pool) == CAP
            most.free()

    def test_a_change_of_options_is_heeded(self, pool: SteppedPool) -> None:
        """New caps are divided while memory is short; switching it off ends that, and on begins it."""
        most = held(pool, 0.81)
        pool.configure(stream_cache_bytes=CAP // 2)
        assert cached(pool) == CAP // 8
        pool.configure(adaptive=False)
        assert cached(pool) == CAP // 2
        pool.configure(adaptive=True)
        assert cached(pool) == CAP // 8
        most.free()

    def test_a_change_of_the_limit_is_heeded(self, pool: SteppedPool) -> None:
        """What is half of a limit is all of another."""
        most = held(pool, 0.5)
        assert cached(pool) == CAP
        pool.resize(limit=LIMIT * 10 // 17)
        assert cached(pool) == CAP // 4
        pool.resize(limit=LIMIT)
        assert cached(pool) == CAP
        most.free()


@pytest.mark.parametrize(("adaptive", "merges"), [(True, True), (False, False)])
def test_neighbours_are_merged_where_memory_is_short(adaptive: bool, merges: bool) -> None:
    """Free memory of two streams is one hole then, also where less fragmentation than that would be let be."""
    device = quick_device(LIMIT)
    with pool_of(device, adaptive=adaptive, merge_threshold=1.0, stream_cache_bytes=0) as pool:
        other = device.create_stream()
        first, second = pool.allocate(4 * MIB), pool.allocate(4 * MIB, stream=other)
        first.free()
        second.free()
        assert pool._opened.core.largest() == 4 * MIB
        most = pool.allocate(LIMIT * 82 // 100)
        assert (pool._opened.core.largest() >= 8 * MIB) == merges
        most.free()


class TestIdle:
    """Memory goes back once nothing has been allocated or freed for a while."""

    class Clock:
        """Time that goes on when it is told to, from far beyond the machine's."""

        def __init__(self) -> None:
            self.now = 1e9

        def look(self, pool: AsyncMemoryPool) -> None:
            """Have a pool looked after at this time."""
            core = pool._opened.core
            core.scheduler.tick(self.now)
            core.carry_out()

    @pytest.fixture
    def clock(self) -> Clock:
        return self.Clock()

    def test_it_is_given_back_once(self, clock: Clock) -> None:
        """After the time that was set and not before; what is in use stays, and its segment."""
        with pool_of(quick_device(LIMIT), shrink_after=30) as pool:
            kept = pool.allocate(5 * MIB)
            pool.allocate(20 * MIB).free()
            reserved = pool.stats().reserved_bytes
            for _ in range(3):
                clock.look(pool)
                clock.now += 14
            assert pool.stats().reserved_bytes == reserved
            clock.now += 3
            clock.look(pool)
            assert kept.nbytes <= pool.stats().reserved_bytes < reserved
            trims = pool.stats().trims
            clock.now += 100
            clock.look(pool)
            assert pool.stats().trims == trims
            kept.free()
            clock.look(pool)
            clock.now += 31
            clock.look(pool)
            assert pool.stats().reserved_bytes == 0

    def test_use_begins_the_time_anew(self, clock: Clock) -> None:
        """A single allocation is enough."""
        with pool_of(quick_device(LIMIT), shrink_after=30) as pool:
            for _ in range(5):
                pool.allocate(MIB).free()
                clock.look(pool)
                clock.now += 29
            clock.look(pool)
            assert pool.stats().reserved_bytes > 0

    @pytest.mark.parametrize(("options", "left"), [({"shrink_after": 1, "pregrow": 16 * MIB}, 16 * MIB), ({}, 8 * MIB)])
    def test_what_is_to_be_ready_stays(self, clock: Clock, options: dict[str, int], left: int) -> None:
        """So does everything where no time is set."""
        with pool_of(quick_device(LIMIT), **options) as pool:
            pool.allocate(MIB * 2).free()
            for _ in range(3):
                clock.look(pool)
                clock.now += 1000
            assert pool.stats().reserved_bytes == left

    def test_a_device_that_fails_is_warned_of(self, clock: Clock) -> None:
        """Nobody asked for this, so nobody gets the error; what did not go back is offered again later."""
        device = quick_device(LIMIT)
        with pool_of(device, shrink_after=1) as pool:
            pool.allocate(MIB).free()
            clock.look(pool)
            clock.now += 2
            device.fail("free_segment", error=DeviceError("free_segment", code=1, code_name="NO", device=device.name))
            with pytest.warns(RuntimeWarning, match="free_segment"):
                clock.look(pool)

    @pytest.mark.timeout(60)
    def test_the_worker_looks(self) -> None:
        """A pool that nobody uses any more ends with nothing reserved, without anybody's call."""
        with AsyncMemoryPool("simulated", shrink_after=0) as pool:
            pool.allocate(MIB).free()
            while pool.stats().reserved_bytes:
                time.sleep(0.01)
            assert pool.stats().trims > 0
