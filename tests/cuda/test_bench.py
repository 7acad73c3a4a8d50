"""`asyncmem bench --device cuda:0` on whichever driver there is: our rows, and the driver's own allocator."""

from pathlib import Path

import pytest

from asyncmem.cli.benchmarks.device import DEVICE_ROWS
from asyncmem.cli.benchmarks.device.child import Task, measure
from asyncmem.cli.benchmarks.device.measured import Measured
from asyncmem.cli.benchmarks.peers.family import OURS

from .fake import FakeDriver
from .leftovers import check_nothing_left

GIB = 1 << 30
RECORDED = Path(__file__).parents[1] / "traces" / "four_streams.npz"

ROWS = [name for name, row in DEVICE_ROWS.items() if OURS in row.families]
DRIVERS = ["hit", "churn", "batch", "large", "cross_stream", "growth", "loop_stall", "replay"]


def a_moment(family: str, row: str) -> list[object]:
    """Measure as little as can be measured."""
    task = Task(
        family=family, device="cuda:0", rows=(row,), repeats=2, repeat_ns=1000, share=0.01, traces=(str(RECORDED),)
    )
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
