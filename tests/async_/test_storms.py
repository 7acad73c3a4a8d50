"""Storms over real loops and threads: everybody comes to an end, and the pool is as it was."""

from functools import partial

import pytest

from .loops import Run, on_trio, plain, uv
from .storm import Storm, close_in_the_midst

EACH = 10
LOOPS: list[Run] = [plain, uv, on_trio]


@pytest.mark.hazard("H1", "H6", "H10")
@pytest.mark.timeout(120)
@pytest.mark.parametrize("first", range(0, 60, EACH))
@pytest.mark.parametrize("run", LOOPS, ids=lambda run: run.__name__)
def test_every_storm_ends_clean(run: Run, first: int) -> None:
    """48 tasks and 12 threads over four nested budgets: whoever may be served is, and nothing is lost."""
    for seed in range(first, first + EACH):
        run(Storm(seed).run)


@pytest.mark.timeout(120)
@pytest.mark.filterwarnings("ignore:.*was closed while buffers:asyncmem.LeakWarning")  # that is what this is about
@pytest.mark.parametrize("first", range(0, 40, EACH))
@pytest.mark.parametrize("run", LOOPS, ids=lambda run: run.__name__)
def test_a_storm_over_a_closed_pool_ends(run: Run, first: int) -> None:
    """A pool that is closed in the midst of it lets everybody go, and gives all of its memory back."""
    for seed in range(first, first + EACH):
        run(partial(close_in_the_midst, seed))
