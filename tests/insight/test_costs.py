"""Nobody pays for records that nobody wants, and those who want them pay little."""

import time
from collections.abc import Callable

import pytest

from asyncmem import AsyncMemoryPool
from asyncmem.insight import Recording

COUNT = 500  # so few that some of many tries are not interrupted


def hits(pool: AsyncMemoryPool) -> float:
    """Return the seconds for a hit and its free.

    By the wall clock: a clock of the thread's own time ticks too coarsely to measure microseconds on some machines.
    """
    allocate = pool.allocate
    began = time.perf_counter()
    for _ in range(COUNT):
        allocate(4096)
    return (time.perf_counter() - began) / COUNT


def fastest(*looks: Callable[[], float], tries: int = 200) -> list[float]:
    """The least of many tries of each, taken in turns, so that what the machine does meanwhile strikes all alike."""
    return [min(times) for times in zip(*([look() for look in looks] for _ in range(tries)), strict=True)]


@pytest.mark.may_block
def test_a_pool_that_was_recorded_is_as_fast_as_one_that_never_was() -> None:
    """After the end of a recording a hit is what it was: the same way, without a question more."""
    with AsyncMemoryPool("simulated") as never, AsyncMemoryPool("simulated") as once:
        with Recording(once):
            hits(once)
        for pool in (never, once):
            hits(pool)
        without, removed = fastest(lambda: hits(never), lambda: hits(once))
    assert removed < 1.5 * without


@pytest.mark.may_block
def test_a_record_costs_about_a_microsecond_at_most() -> None:
    """An allocation and its free are two; beside the hit itself they cost tens of times as much, and no more."""
    with AsyncMemoryPool("simulated") as never, AsyncMemoryPool("simulated") as recorded:
        hits(never)
        with Recording(recorded, keep=10_000):
            hits(recorded)
            without, with_records = fastest(lambda: hits(never), lambda: hits(recorded))
    assert with_records < 80 * without
