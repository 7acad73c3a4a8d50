"""What a pool says of itself is of one moment, whatever other threads do between two calls of the core."""

from collections.abc import Callable, Iterator

import pytest

from asyncmem import AsyncMemoryPool, Budget, PoolClosed
from asyncmem.insight.live.server import look
from asyncmem.pool import snapshot

from .onlookers import agree

MIB = 1 << 20


@pytest.fixture
def pool() -> Iterator[AsyncMemoryPool]:
    with AsyncMemoryPool("simulated", limit=8 * MIB, name="looked at") as pool:
        yield pool


def in_between(monkeypatch: pytest.MonkeyPatch, name: str, act: Callable[[], object]) -> None:
    """Have something happen once in the middle of a look, where another thread may have its turn."""
    real, left = getattr(snapshot, name), [act]

    def call(*arguments: object, **named: object) -> object:
        if left:
            left.pop()()
        return real(*arguments, **named)

    monkeypatch.setattr(snapshot, name, call)


def test_figures_are_of_one_moment(pool: AsyncMemoryPool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A buffer that comes in the middle is in all of them."""
    held = [pool.allocate(MIB)]
    in_between(monkeypatch, "largest_hole", lambda: held.append(pool.allocate(MIB)))
    stats = pool.stats()
    agree(stats)
    assert (stats.allocated_bytes, stats.largest_hole) == (2 * MIB, 6 * MIB)


def test_a_budget_that_is_closed_meanwhile_says_so(pool: AsyncMemoryPool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its figures are never those of the pool, which its account's number stands for then."""
    budget = pool.budget("short", limit=MIB)
    in_between(monkeypatch, "PoolStats", budget.close)
    with pytest.raises(PoolClosed):
        budget.stats()


def test_a_look_leaves_out_a_budget_that_is_closed_meanwhile(
    pool: AsyncMemoryPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`asyncmem top` goes on to show the pool and its other budgets."""
    budgets = [pool.budget(name, limit=MIB) for name in ("first", "second")]
    real = Budget.stats
    monkeypatch.setattr(Budget, "stats", lambda self: (budgets[0].close(), real(self))[1])
    (found,) = (one for one in look()["pools"] if one["stats"]["name"] == pool.name)
    assert [one["name"] for one in found["budgets"]] == ["second"]


def test_the_range_of_a_lease_is_freed_with_it(pool: AsyncMemoryPool) -> None:
    """Allocations less frees are the buffers that are there, also after leases."""
    for _ in range(3):
        with pool.lease(MIB) as lease:
            held = lease.allocate(512)
    stats = pool.stats()
    assert stats.num_allocations - stats.num_frees == stats.active_buffers == 1
    held.free()
