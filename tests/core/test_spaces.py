"""The compiled heap and its twin agree about spaces."""
import random
import pytest
from .paged import PagedPair, paged_step
from asyncmem.core.reference import ReferenceHeap


def live_through(seed: int, steps: int, twin: ReferenceHeap | None = None) -> None:
    draw = random.Random(seed)
    pair = PagedPair(twin, strategy="good_fit" if seed % 5 == 4 else "best_fit")
    for _ in range(steps):
        paged_step(pair, draw)
        pair.compare()


@pytest.mark.parametrize("seed", range(20))
def test_long_histories_are_equal_step_by_step(seed: int) -> None:
    """Whatever is asked"""
    live_through(seed, 250)
