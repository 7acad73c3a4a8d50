"""The deadlock proof: what it calls stuck is stuck, and what could go on is never called so."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from asyncmem.engine.deadlock import Claim, Space, stuck

SPACE = Space(capacity=8, limit=8, segments=[(0, 8)])


def claim(owner: str, nbytes: int, *, patient: bool = True, barred: bool = False) -> Claim:
    """Make the claim of an owner for one piece."""
    return Claim(owner, nbytes, nbytes, patient, barred)


def test_two_owners_who_hold_what_the_other_needs_are_stuck() -> None:
    """Each holds half and wants more than is left."""
    claims = [claim("a", 4), claim("b", 4)]
    assert stuck(claims, {"a": [(0, 4)], "b": [(4, 4)]}, SPACE) == claims


def test_owner_who_does_not_wait_is_expected_to_free() -> None:
    """Memory of somebody who still runs is no proof."""
    assert stuck([claim("a", 6)], {"a": [(0, 2)], "b": [(2, 6)]}, SPACE) == []


def test_one_who_can_go_on_frees_the_others() -> None:
    """The reduction follows the chain."""
    held = {"a": [(4, 2)], "b": [(2, 2)], "c": [(0, 2)]}
    assert stuck([claim("a", 2), claim("b", 4), claim("c", 6)], held, SPACE) == []


def test_deadline_is_a_way_out() -> None:
    """A waiter that gives up by itself is never stuck, and frees what it holds."""
    held = {"a": [(0, 4)], "b": [(4, 4)]}
    assert stuck([claim("a", 4, patient=False), claim("b", 4)], held, SPACE) == []


def test_own_buffer_in_the_middle_is_in_the_way() -> None:
    """The bytes would do, but no range is long enough while the waiter itself keeps the middle."""
    assert stuck([claim("a", 4)], {"a": [(3, 2)]}, SPACE) != []
    assert stuck([claim("a", 4)], {"a": [(0, 2)]}, SPACE) == []


def test_segment_that_nobody_keeps_can_come_in_another_shape() -> None:
    """Two segments of four can become one of eight, unless one of them is held."""
    space = Space(capacity=8, limit=8, segments=[(0, 4), (100, 4)])
    assert stuck([claim("a", 8)], {}, space) == []
    assert stuck([claim("a", 5)], {"a": [(0, 1)]}, space) != []


def test_barred_waiter_waits_for_those_before_it() -> None:
    """Where nobody may overtake any more, the head's memory is held by one who stands behind it."""
    held = {"b": [(0, 2)]}
    assert stuck([claim("a", 8), claim("b", 2)], held, SPACE) == []
    assert stuck([claim("a", 8), claim("b", 2, barred=True)], held, SPACE) != []


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 6)), min_size=1, max_size=4), st.integers(4, 8))
def test_proof_agrees_with_trying_every_order(owners: list[tuple[int, int]], capacity: int) -> None:
    """Stuck is exactly what no order of serving the waiters resolves, counted in bytes."""
    names = [str(number) for number in range(len(owners))]
    held = {
        name: [(index * 10, size)] for index, (name, (size, _)) in enumerate(zip(names, owners, strict=True)) if size
    }
    claims = [claim(name, wanted) for name, (_, wanted) in zip(names, owners, strict=True)]
    space = Space(capacity, 1000, [])

    def resolves(order: tuple[Claim, ...]) -> bool:
        free = capacity - sum(size for size, _ in owners)
        for one in order:
            if one.nbytes > free:
                return False
            free += sum(size for _, size in held.get(one.owner, []))
        return True

    assert (not stuck(claims, held, space)) == any(map(resolves, itertools.permutations(claims)))
