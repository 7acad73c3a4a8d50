"""`asyncmem bench --device cuda:0` on whichever driver there is: our rows, and the driver's own allocator."""

import time
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from asyncmem import AsyncMemoryPool
from asyncmem.cli.bench.timing import Effort
from asyncmem.devices import Cuda
from benchmarks import comparison
from benchmarks.allocators import OURS
from benchmarks.alone import SUITE
from benchmarks.suite import Measured, Task, measure
from benchmarks.take_back import Repeater, Take, by_driver, by_pool

from .fake import FakeDriver
from .leftovers import check_nothing_left

GIB = 1 << 30
RECORDED = Path(__file__).parents[1] / "traces" / "four_streams.npz"

ROWS = [name for name in comparison.SUITE.rows if comparison.SUITE.takes_part(comparison.SUITE.family(OURS), name)]
DRIVERS = ["hit", "churn", "batch", "large", "cross_stream", "growth", "loop_stall", "replay"]


def a_moment(family: str, row: str) -> list[object]:
    """Measure as little as can be measured."""
    suite = SUITE.module if row in SUITE.rows else comparison.SUITE.module
    traces = (str(RECORDED),)
    task = Task(suite=suite, family=family, device="cuda:0", rows=(row,), effort=Effort(2, 1000, 0.01), traces=traces)
    return list(measure(task))


@pytest.mark.may_block  # what a synchronous call costs on a loop's thread is what some rows measure
@pytest.mark.parametrize("row", ROWS)
def test_every_row_measures_our_pool_on_a_card(driver: FakeDriver | None, row: str) -> None:
    """No row fails, uses memory out of order, or leaves anything behind."""
    if driver is not None:
        driver.devices(1, 128 * GIB)
    lines = a_moment(OURS, row)
    assert lines
    for line in lines:
        assert isinstance(line, Measured), line
        assert 0 < line.min <= line.median
    check_nothing_left(driver, {})


@pytest.mark.may_block
@pytest.mark.parametrize("row", DRIVERS)
def test_the_drivers_allocator_does_the_same_work(driver: FakeDriver | None, row: str) -> None:
    """The bare calls come through every row of theirs, in an order that the driver allows, and free what they took."""
    if driver is not None:
        driver.devices(1, 128 * GIB)
    lines = a_moment("driver", row)
    assert lines
    for line in lines:
        assert isinstance(line, Measured), line
        assert line.peer == "cuMemAllocAsync"
        assert line.beside is None or line.beside > 0
    check_nothing_left(driver, {})


@pytest.mark.parametrize("way", ["pool", "driver"])
def test_takers_take_while_their_gate_is_open(driver: FakeDriver | None, cuda: Cuda, way: str) -> None:
    """They begin when the gate opens and are idle once it has closed, and all that they took is given back."""
    with AsyncMemoryPool(cuda, limit="64 MiB", min_free=0) as pool:
        free = cuda.memory().free
        made: AbstractContextManager[Take] = by_pool(pool, 8 << 20) if way == "pool" else by_driver(0, 8 << 20)
        with Repeater(made) as taker:
            for _ in range(2):
                before = taker.taken
                with taker.open():
                    while taker.taken == before:
                        time.sleep(0.001)
                at_rest = taker.taken
                time.sleep(0.02)
                assert taker.taken == at_rest
        assert taker.taken % (8 << 20) == 0
        if driver is not None:  # others may use a real card meanwhile
            assert cuda.memory().free == free
    if way == "driver":
        assert pool.stats().trims == 0


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_taker_that_fails_holds_nobody_up(driver: FakeDriver | None) -> None:
    """More addresses than there are: the error is shown, and whoever opens the gate hears of it."""
    with Repeater(by_driver(0, 1 << 60)) as taker, pytest.raises(RuntimeError, match="ended early"), taker.open():
        pass
    check_nothing_left(driver, {})
