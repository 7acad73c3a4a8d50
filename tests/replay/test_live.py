"""A program goes through a real pool as it was recorded, behind a device that is as late as was said."""

import math

import numpy as np
import pytest

from asyncmem import AsyncMemoryPool, InvalidRequest
from asyncmem.devices import Simulated
from asyncmem.replay import LiveReplay, Op, Trace, pool_options, record, replay_on

from .programs import MIB, MS, Program, random_program

SIZES = (700, 40_000, 300_000, 3 * MIB)


def played(
    trace: Trace, policy: str = "stream_ordered", *, lag: float = 0, pace: float | None = None, **options: int
) -> LiveReplay:
    """Replay on a simulated device."""
    with AsyncMemoryPool("simulated", options=pool_options(policy), **options) as pool:  # type: ignore[arg-type]
        found = replay_on(pool, trace, lag=lag, pace=pace)
        assert pool.stats().allocated_bytes == 0
        return found


def test_the_figures_can_be_worked_out() -> None:
    """What lives at the end counts as taken and is given back; nothing is waited for without lag."""
    trace = Program().take("a", 3 * MIB).take("b", 513).free("a").take("c", 2 * MIB).take("d", 0).trace()
    one = played(trace, "stream_ordered,segment_size=2MiB")
    assert (one.name, one.device, one.lag) == ("program", "simulated:0", 0)
    assert (one.completed, one.failed_row, one.failed_bytes) == (True, None, 0)
    assert (one.takes, one.frees) == (4, 1)
    assert (one.peak_requested, one.peak_active) == (3 * MIB + 513, 3 * MIB + 1024)
    assert one.peak_reserved == 5 * MIB  # one segment for what is small
    assert one.reserved_over_requested == 5 * MIB / (3 * MIB + 513)
    assert (one.waits, one.wait_seconds) == (0, 0)
    assert one.driver_calls > 0
    assert one.ns_per_op > 0
    assert repr(one) == "<asyncmem.replay.LiveReplay 'program' on simulated:0: 5 MiB reserved for 3.00 MiB>"


@pytest.mark.parametrize("seed", range(3))
def test_the_pool_is_asked_for_what_was_recorded(seed: int) -> None:
    """A recording of the replay is the trace itself, but for its times and what is live at the end."""
    trace = random_program(seed, SIZES, steps=400, streams=3)
    with AsyncMemoryPool("simulated") as pool, record(pool) as recorder:
        replay_on(pool, trace)
        again = recorder.trace()
    rest = again.op[len(trace) :]
    assert (rest == Op.FREE).all()
    for name in ("op", "stream", "id", "nbytes"):
        assert np.array_equal(getattr(again, name)[: len(trace)], getattr(trace, name))


@pytest.mark.parametrize("name", ["host", "simulated", "simulated by the wall", "opencl", "metal"])
def test_random_programs_complete_on_a_device_that_is_late(request: pytest.FixtureRequest, name: str) -> None:
    """On streams that sleep, and on either clock of the simulated device."""
    device = {
        "simulated by the wall": lambda: Simulated(clock="wall"),
        "opencl": lambda: request.getfixturevalue("opencl"),
        "metal": lambda: request.getfixturevalue("metal"),
    }.get(name, lambda: name)()
    trace = random_program(7, SIZES, steps=300, streams=3)
    with AsyncMemoryPool(device) as pool:
        one = replay_on(pool, trace, lag=0.005, pace=0.1)
    assert one.completed
    assert (one.device.partition(":")[0] in repr(device).lower(), one.takes) == (True, trace.allocations)
    assert one.duration == pytest.approx(trace.duration / 10)
    assert one.peak_reserved >= one.peak_active >= one.peak_requested == trace.peak_requested


@pytest.mark.parametrize("lag", [0.02, 0.5])
def test_memory_that_is_in_use_is_waited_for(lag: float) -> None:
    """Under a limit a larger block has to wait until the device is done with the one before it."""
    program = Program().take("a", 8 * MIB, stream=1).at(1000 * MS).free("a", stream=1)
    one = played(program.take("b", 16 * MIB, stream=1).trace(), lag=lag, limit=16 * MIB, segment_size=8 * MIB)
    assert one.completed
    assert one.waits == 1
    assert 0.9 * lag < one.wait_seconds < 1.1 * lag


@pytest.mark.parametrize("lag", [0, 0.001])
@pytest.mark.parametrize("pace", [0.1, 1, 3])
def test_time_is_kept(pace: float, lag: float) -> None:
    """The program takes the time that was recorded, or a multiple."""
    with AsyncMemoryPool(device := Simulated()) as pool:
        replay_on(pool, Program().take("a", 1).at(100 * MS).free("a").trace(), lag=lag, pace=pace)
        assert abs(device.now - 0.1 * pace) < 0.01


def test_no_time_is_kept_where_nothing_asks_for_it() -> None:
    """With neither a lag nor a pace the program goes as fast as it can."""
    with AsyncMemoryPool(device := Simulated()) as pool:
        one = replay_on(pool, Program().take("a", 1).at(100 * MS).free("a").trace())
        assert device.now < 0.05
        assert one.duration == 0.1


@pytest.mark.parametrize("lag", [0, 0.001])
def test_what_does_not_fit_ends_the_replay(lag: float) -> None:
    """The row is named that asked for too much; what was taken before is given back."""
    trace = Program().take("a", 4 * MIB).free("a").take("b", 4 * MIB).take("c", 9 * MIB).take("d", 1).trace()
    one = played(trace, lag=lag, limit=8 * MIB)
    assert (one.completed, one.failed_row, one.failed_bytes) == (False, 3, 9 * MIB)
    assert (one.takes, one.frees) == (2, 1)
    assert repr(one).endswith("out of memory in row 3>")


def test_an_empty_program_needs_nothing() -> None:
    """There is nothing to divide by either."""
    one = played(Program().trace(), lag=0.01)
    assert (one.takes, one.ns_per_op, one.reserved_over_requested) == (0, 0, 1)


@pytest.mark.parametrize("wrong", [{"lag": -1.0}, {"lag": math.inf}, {"pace": math.nan}])
def test_wrong_numbers_are_refused(wrong: dict[str, float]) -> None:
    """Before anything is done."""
    with AsyncMemoryPool("simulated") as pool, pytest.raises(InvalidRequest, match="a number from 0"):
        replay_on(pool, Program().take("a", 1).trace(), **wrong)


def test_all_options_of_a_pool_are_settings() -> None:
    """The kind of segments comes first, and "auto" is meant where it is missing."""
    assert pool_options("direct,overlap=0,min_free=1GiB").segments == "direct"
    assert pool_options("overlap=0").segments == "auto"
    assert pool_options("overlap=5MiB").overlap == 5 * MIB
    with pytest.raises(InvalidRequest, match="segment_size"):
        pool_options("segment_sice=2MiB")
    with pytest.raises(InvalidRequest, match="settings such as"):
        pool_options("direct,overlap")
