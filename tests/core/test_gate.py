"""A gate left ajar: who waits is passed by so many bytes and no more, and what comes is not for those who pass."""

import pytest

from asyncmem.core import FLAG_WAITING
from asyncmem.core.report import Plan

from .support import MEMORY, FakePool, Missed

KIB = 1 << 10


@pytest.fixture
def pool() -> FakePool:
    """Make a pool where somebody waits."""
    pool = FakePool()
    pool.core.set_gate(0, True)
    return pool


def passes(pool: FakePool, nbytes: int = KIB) -> bool:
    """Return whether a door serves so much now; what it serves is freed at once."""
    try:
        pool.allocate(nbytes).free()
    except Missed:
        return False
    return True


def test_doors_pass_for_as_many_bytes_as_allowed(pool: FakePool) -> None:
    """Each grant counts with what it takes of the heap, and one that is too large for what is left has to wait."""
    pool.core.leave_ajar(5 * KIB, 0)
    assert [passes(pool) for _ in range(3)] == [True] * 3
    assert [passes(pool, 4 * KIB), passes(pool, 2 * KIB - 1), passes(pool)] == [False, True, False]
    assert pool.core.close_up() == 5 * KIB
    assert pool.core.close_up() == 0


def test_batches_count_as_a_whole(pool: FakePool) -> None:
    """All of a batch passes, or nothing of it."""
    pool.core.leave_ajar(8 * KIB, 0)
    with pytest.raises(Missed):
        pool.allocate_batch([KIB] * 9)
    pool.allocate_batch([KIB, 4 * KIB, KIB]).result().free()
    assert pool.core.close_up() == 6 * KIB


def test_what_misses_has_not_passed(pool: FakePool) -> None:
    """Only what was granted has overtaken anybody."""
    pool.core.leave_ajar(2 * MEMORY, 0)
    assert not passes(pool, MEMORY)
    assert pool.core.close_up() == 0


def test_it_closes_when_a_segment_comes(pool: FakePool) -> None:
    """New memory is for whoever waits: no door sees it before."""
    pool.core.leave_ajar(MEMORY, 0)
    pool.core.add_segment(1 << 40, KIB << 10, 0, 0)
    assert not passes(pool)


def test_it_closes_when_pages_come(pool: FakePool) -> None:
    """Memory below a space is as new as a segment, once it is let go."""
    core = pool.core
    core.add_space(1 << 40, 1 << 30, 1, 2 << 20)
    plan = core.plan(2 * MEMORY, 0)
    assert isinstance(plan, Plan)
    core.leave_ajar(MEMORY, 0)
    for address, nbytes in plan.fresh:
        core.set_mapped(plan.segment, address, nbytes)
    assert passes(pool)
    core.let_go(plan.segment, plan.address, plan.nbytes)
    assert not passes(pool)


def test_it_closes_when_the_gate_is_set(pool: FakePool) -> None:
    """Closed and opened anew, it is just that."""
    pool.core.leave_ajar(MEMORY, 0)
    pool.core.set_gate(0, True)
    assert not passes(pool)
    pool.core.leave_ajar(MEMORY, 0)
    pool.core.set_gate(0, False)
    pool.core.set_gate(0, True)
    assert not passes(pool)


def test_an_open_gate_cannot_be_left_ajar(pool: FakePool) -> None:
    """So nothing is counted where nobody waits, and nothing is left for the next one who does."""
    pool.core.set_gate(0, False)
    pool.core.leave_ajar(MEMORY, MEMORY)
    assert passes(pool)
    pool.core.set_gate(0, True)
    assert not passes(pool)
    assert pool.core.close_up() == 0


def test_other_gates_stay_closed(pool: FakePool) -> None:
    """Where somebody waits for room in a budget as well, nobody passes."""
    budget = pool.core.add_account(0)
    pool.core.leave_ajar(MEMORY, 0)
    pool.core.set_gate(budget, True)
    assert not passes(pool)
    pool.core.set_gate(budget, False)
    assert passes(pool)


def test_a_free_tells_of_itself_once_it_may_be_enough(pool: FakePool) -> None:
    """Who waits for more than is free gains nothing by being looked at."""
    core = pool.core
    core.set_gate(0, False)
    held = [core.take(MEMORY // 4, 0, anywhere=True) for _ in range(4)]
    core.set_gate(0, True)
    core.leave_ajar(MEMORY, MEMORY // 2)
    assert [core.free(held.pop()) for _ in range(3)] == [0, FLAG_WAITING, FLAG_WAITING]
    core.set_gate(0, True)
    assert core.free(held.pop()) == FLAG_WAITING
