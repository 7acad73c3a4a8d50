"""`BucketPool`: buffers come back to whoever needs their size, never too small a one, and never twice."""

import gc
import mmap
import threading
import timeit
import weakref
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncmem import AsyncMemoryPool, BucketPool, InvalidRequest, Pressure

MIB = 1 << 20


class Block:
    """A buffer that knows its size, and can be watched."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes


def taken(pool: BucketPool[Block], size: int) -> Block:
    """Take a block as a user does."""
    block = pool.try_get(size)
    if block is None:
        block = Block(size)
        pool.record_allocation(size)
    return block


def test_what_was_returned_is_found_again() -> None:
    """For its own size, and for smaller ones down to half; not for larger ones."""
    pool: BucketPool[Block] = BucketPool()
    block = taken(pool, 1000)
    for size in (1000, 999, 513):
        assert pool.return_buffer(block, 1000)
        assert pool.try_get(size) is block
    pool.return_buffer(block, 1000)
    for size in (1001, 1024, 512, 1025, 0):
        assert pool.try_get(size) is None


def test_buffers_of_any_kind_are_kept() -> None:
    """Bytearrays, arrays, maps, pinned memory of a pool: the very object comes back."""
    with AsyncMemoryPool("simulated", limit=MIB) as device, mmap.mmap(-1, 4096) as mapped:
        pinned = device.pinned.allocate(4096)
        pool: BucketPool[object] = BucketPool()
        for buffer in (bytearray(4096), np.zeros(512), mapped, pinned):
            pool.return_buffer(buffer, 4096)
            assert pool.try_get("4 KiB") is buffer
        pinned.free()


def test_the_newest_comes_first() -> None:
    """It is the one whose memory is still in the processor's caches."""
    pool: BucketPool[Block] = BucketPool()
    first, second = Block(1024), Block(1024)
    pool.return_buffer(first, 1024)
    pool.return_buffer(second, 1024)
    assert pool.try_get(1024) is second
    assert pool.try_get(1024) is first


def test_a_smaller_buffer_of_the_bucket_is_passed_over() -> None:
    """One that is large enough lies below it, and the smaller one stays for others."""
    pool: BucketPool[Block] = BucketPool()
    large, small = Block(1000), Block(600)
    pool.return_buffer(large, 1000)
    pool.return_buffer(small, 600)
    assert pool.try_get(800) is large
    assert pool.try_get(600) is small
    assert pool.pooled_bytes == 0


def test_a_full_bucket_keeps_no_more() -> None:
    """Eight unless it is said otherwise; other buckets are not concerned, and none at all may be kept."""
    pool: BucketPool[Block] = BucketPool()
    kept = [pool.return_buffer(Block(1024), 1024) for _ in range(9)]
    assert kept == [True] * 8 + [False]
    assert pool.return_buffer(Block(2048), 2048)
    assert BucketPool[Block](max_pooled_per_bucket=0).return_buffer(Block(1), 1) is False
    assert (pool.pooled_buffers, pool.drops) == (9, 1)


def test_the_limit_bounds_what_is_kept() -> None:
    """In use and kept together; what is in use is its users' own affair."""
    pool: BucketPool[Block] = BucketPool(limit=4096)
    blocks = [taken(pool, 2048) for _ in range(3)]
    assert pool.used_bytes == 6144
    assert pool.return_buffer(blocks[0], 2048) is False
    assert pool.return_buffer(blocks[1], 2048) is True
    assert (pool.used_bytes, pool.pooled_bytes, pool.limit) == (2048, 2048, 4096)


def test_pressure_is_what_is_in_use_of_the_limit() -> None:
    """As in a pool of device memory; without a limit there is none."""
    pool: BucketPool[Block] = BucketPool(limit=1000)
    levels = []
    for _ in range(10):
        pool.record_allocation(100)
        levels.append(pool.pressure)
    assert levels[4:8] == [Pressure.LOW, Pressure.MEDIUM, Pressure.MEDIUM, Pressure.HIGH]
    assert levels[-1] is Pressure.CRITICAL
    free: BucketPool[Block] = BucketPool()
    free.record_allocation("1 GiB")
    assert free.pressure is Pressure.LOW


def test_figures_say_how_well_it_works() -> None:
    """Hits, misses, bytes in use, kept, and the most of both."""
    pool: BucketPool[Block] = BucketPool()
    assert pool.hit_rate == 0
    block = taken(pool, 1000)
    pool.return_buffer(block, 1000)
    for _ in range(3):
        pool.return_buffer(taken(pool, 900), 1000)
    stats = pool.stats()
    assert (stats.hits, stats.misses, stats.allocations, stats.drops) == (3, 1, 1, 0)
    assert stats.hit_rate == pool.hit_rate == 0.75
    assert (stats.pooled_bytes, stats.pooled_buffers) == (1000, 1)
    assert (stats.used_bytes, stats.active_buffers, stats.peak_bytes) == (0, 0, 1000)
    assert "1000 B kept in 1 buffer>" in repr(pool)


def test_shrinking_drops_the_largest_first() -> None:
    """Half unless it is said how much may stay; and says how many bytes went."""
    pool: BucketPool[Block] = BucketPool()
    for size in (1024, 2048, 4096, 8192):
        pool.return_buffer(Block(size), size)
    assert pool.stats().peak_bytes == 1024 + 2048 + 4096 + 8192  # none of them recorded
    assert pool.shrink() == 8192
    assert pool.try_get(8192) is None
    assert pool.shrink(keep="1 KiB") == 4096 + 2048
    assert pool.shrink(keep=1024) == 0
    assert pool.pooled_buffers == 1


def test_clearing_lets_all_go() -> None:
    """Nothing keeps the buffers alive, those without bytes neither; counters stay."""
    pool: BucketPool[Block] = BucketPool()
    gone = []
    for size in (0, 1, 4096):
        block = Block(size)
        gone.append(weakref.ref(block))
        pool.return_buffer(block, size)
        del block
    pool.clear()
    gc.collect()
    assert [one() for one in gone] == [None] * 3
    assert (pool.pooled_bytes, pool.pooled_buffers, pool.drops) == (0, 0, 3)


def test_a_buffer_cannot_be_returned_twice() -> None:
    """Else two users would have it."""
    pool: BucketPool[Block] = BucketPool()
    block = Block(64)
    pool.return_buffer(block, 64)
    with pytest.raises(InvalidRequest, match="here already"):
        pool.return_buffer(block, 64)
    assert pool.pooled_bytes == 64


@pytest.mark.parametrize("size", [-1, 1 << 48, 1 << 80, 1.5, "much", None])
def test_what_is_no_size_is_refused(size: object) -> None:
    """By every call, and nothing changes."""
    pool: BucketPool[Block] = BucketPool()
    for call in (pool.try_get, pool.record_allocation, lambda one: pool.return_buffer(Block(0), one)):
        with pytest.raises(InvalidRequest, match="size"):
            call(size)  # type: ignore[operator]  # wrong on purpose
    assert pool.stats() == BucketPool[Block]().stats()


@pytest.mark.parametrize("wrong", [{"max_pooled_per_bucket": -1}, {"max_pooled_per_bucket": 1 << 20}, {"limit": "x"}])
def test_options_that_cannot_be_right_are_refused(wrong: dict[str, int]) -> None:
    """By their name."""
    with pytest.raises(InvalidRequest, match=next(iter(wrong))):
        BucketPool(**wrong)


def test_a_buffer_that_ends_may_use_the_pool() -> None:
    """What it does as it ends finds everything in order."""
    pool: BucketPool[object] = BucketPool()
    seen = []

    class Speaking:
        def __del__(self) -> None:
            seen.append(pool.pooled_bytes)
            pool.return_buffer(bytearray(16), 16)

    pool.return_buffer(Speaking(), 1024)
    pool.return_buffer(Speaking(), 2048)
    assert pool.shrink(keep=0) == 3072
    assert seen == [0, 16]
    assert pool.pooled_bytes == 32


Steps = list[tuple[str, int]]


@given(
    st.lists(st.tuples(st.sampled_from(["get", "return", "shrink"]), st.integers(0, 5000)), max_size=60),
    st.integers(0, 3),
)
def test_any_history_keeps_the_promises(steps: Steps, most: int) -> None:
    """No buffer is too small, more than twice as large, or in two hands; and the sums agree."""
    pool: BucketPool[Block] = BucketPool(max_pooled_per_bucket=most)
    held: list[Block] = []
    for kind, number in steps:
        if kind == "get":
            block = taken(pool, number)
            assert number <= block.nbytes < max(2 * number, 2)
            assert not any(block is other for other in held)
            held.append(block)
        elif kind == "return" and held:
            block = held.pop(number % len(held))
            pool.return_buffer(block, block.nbytes)
        elif kind == "shrink":
            before = pool.pooled_bytes
            assert pool.shrink(keep=number) == before - pool.pooled_bytes
            assert pool.pooled_bytes <= number
        assert pool.used_bytes == sum(block.nbytes for block in held)
        assert pool.active_buffers == len(held)


def test_threads_share_it() -> None:
    """No buffer is in two hands, and none is lost."""
    pool: BucketPool[Block] = BucketPool(max_pooled_per_bucket=4)
    faults: list[str] = []
    owned: set[int] = set()

    def sizes(seed: int) -> Iterator[int]:
        for step in range(3000):
            yield 512 + (step * 7919 + seed) % 512

    def work(seed: int) -> None:
        for size in sizes(seed):
            block = taken(pool, size)
            if block.nbytes < size or id(block) in owned:
                faults.append("in two hands" if block.nbytes >= size else "too small")
            owned.add(id(block))
            owned.discard(id(block))
            pool.return_buffer(block, block.nbytes)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults
    stats = pool.stats()
    assert stats.hits + stats.misses == 12000
    assert (stats.used_bytes, stats.active_buffers) == (0, 0)
    assert stats.pooled_buffers == stats.allocations - stats.drops


def test_taking_and_returning_costs_no_more_than_four_objects() -> None:
    """The best of several tries, against the making of plain objects in the same process."""
    pool: BucketPool[bytearray] = BucketPool()
    pool.return_buffer(bytearray(MIB), MIB)
    number = 20_000
    ratio = min(
        timeit.timeit("pool.return_buffer(pool.try_get(1048576), 1048576)", globals={"pool": pool}, number=number)
        / timeit.timeit("object()", number=number)
        for _ in range(15)
    )
    assert ratio <= 4
