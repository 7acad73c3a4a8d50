"""A program that does the same in each round gets the memory for it, and not caches that are emptied each time."""

from asyncmem import AsyncMemoryPool
from asyncmem.devices import Simulated
from benchmarks.workloads import transformer_step

PLAN = transformer_step()
ROUNDS = 10


def play(pool: AsyncMemoryPool, rounds: int) -> None:
    live: list[object] = [None] * (1 + max(slot for slot, _, _ in PLAN))
    for _ in range(rounds):
        for slot, size, _ in PLAN:
            live[slot] = pool.allocate(size) if size else None


def test_a_round_that_comes_out_short_is_given_a_little_more() -> None:
    """After some rounds nothing misses any more, for an eighth more than the most that is live."""
    with AsyncMemoryPool(Simulated("64 GiB")) as pool:
        play(pool, ROUNDS)
        before = pool.stats()
        play(pool, ROUNDS)
        after = pool.stats()
        assert after.num_cache_misses == before.num_cache_misses
        assert after.grows == before.grows
        assert after.peak_reserved <= 1.125 * after.peak_allocated
        pool.check()


def test_where_there_is_no_more_the_caches_are_emptied_each_time() -> None:
    """Under a limit that leaves no room for another segment every round is served all the same."""
    with AsyncMemoryPool(Simulated("64 GiB")) as pool:
        play(pool, 1)
        enough = pool.stats().peak_reserved
    with AsyncMemoryPool(Simulated("64 GiB"), limit=enough) as pool:
        play(pool, ROUNDS)
        assert pool.stats().peak_reserved <= enough
        pool.check()
