"""Ranges of addresses that are taken and given back in parts."""

from asyncmem.devices.ranges import Ranges


def test_holes_are_taken_first_fit_and_merge() -> None:
    """The lowest hole that is large enough is taken, and what lies side by side is one hole again."""
    space = Ranges((100, 50))
    first, second, third = (space.take(10) for _ in range(3))
    assert (first, second, third) == (100, 110, 120)
    space.give_back(100, 10)
    assert space.take(20) == 130
    space.give_back(120, 10)
    space.give_back(110, 10)
    assert space.take(30) == 100
    assert space.take(1) is None
