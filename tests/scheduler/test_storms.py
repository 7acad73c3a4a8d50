"""Random histories of the bare scheduler: whoever can be served is served, and nothing is lost."""

import os

import pytest

from .model import BrokenPromise
from .world import World

FIRST, LAST = map(int, os.environ.get("ASYNCMEM_STORMS", "0:4000").split(":"))
EACH = 100


def play(seed: int) -> World:
    """Play one history; one that fails is played again, to tell what came before."""
    try:
        return World(seed).run()
    except BrokenPromise:
        World(seed, told=True).run()
        raise


@pytest.mark.parametrize("first", range(FIRST, LAST, EACH))
def test_every_history_ends_well(first: int) -> None:
    """After each step every invariant holds and nobody waits in vain; in the end all is given back."""
    worlds = [play(seed) for seed in range(first, first + EACH)]
    assert sum(world.served for world in worlds) > 10 * EACH
    assert any(world.deadlocks for world in worlds)
