"""Programs that were recorded go through pools on a card, behind kernels that spin."""

import gc

import pytest

from asyncmem import AsyncMemoryPool
from asyncmem.core import DRIVER_CALLS
from asyncmem.devices import Cuda
from asyncmem.replay import measure_costs, replay_on
from asyncmem.replay.live import CudaBusy
from tests.replay.programs import MIB, Program, random_program

from .fake import FakeDriver

SIZES = (700, 40_000, 300_000, 3 * MIB)


@pytest.mark.parametrize("segments", ["paged", "stream_ordered", "direct"])
@pytest.mark.parametrize("lag", [0, 0.002])
def test_random_programs_complete_in_order(driver: FakeDriver | None, cuda: Cuda, segments: str, lag: float) -> None:
    """On several streams, for each kind of segments; nothing is left, and no memory was used out of order."""
    trace = random_program(11, SIZES, steps=150, streams=3)
    with AsyncMemoryPool(cuda, segments=segments, min_free=0) as pool:
        one = replay_on(pool, trace, lag=lag, pace=0.1)
    assert one.completed
    assert (one.device, one.takes) == ("cuda:0", trace.allocations)
    assert one.peak_reserved >= one.peak_requested
    assert one.driver_calls > 0
    gc.collect()
    if driver is not None:
        assert driver.violations() == []


def test_what_kernels_hold_is_waited_for(cuda: Cuda) -> None:
    """Under a limit a larger block comes once the card is done, and no sooner."""
    program = Program().take("a", 8 * MIB, stream=1).free("a", stream=1).take("b", 16 * MIB, stream=1)

    def waits() -> bool:
        with AsyncMemoryPool(cuda, limit=16 * MIB, segment_size=8 * MIB, min_free=0, segments="stream_ordered") as pool:
            one = replay_on(pool, program.trace(), lag=0.5)
        assert one.completed
        return one.waits >= 1 and one.wait_seconds > 0.1

    assert any(waits() for _ in range(10))  # a busy machine may hold the program up for longer than the card is busy


def test_a_kernel_spins_until_it_is_told(cuda: Cuda) -> None:
    """Neither is it done at once, nor does it go on for ever; and many add up to no more than the last."""
    busy = CudaBusy(cuda)
    stream = cuda.create_stream()
    began = busy.now()
    for part in range(1, 101):
        busy.hold(stream, began + 0.003 * part)
    fence = stream.record()
    assert not fence.done() or busy.now() - began >= 0.3
    assert fence.block(60)
    assert busy.now() - began >= 0.29

    def hold_for_nothing() -> float:
        again = busy.now()
        busy.hold(stream, began)  # past
        assert stream.record().block(60)
        return busy.now() - again

    assert min(hold_for_nothing() for _ in range(10)) < 0.25  # a busy machine may take longer over some
    busy.close()


def test_what_calls_take_is_measured(driver: FakeDriver | None, cuda: Cuda) -> None:
    """All but those for fences; the first points are of small things, and nothing stays taken."""
    free = cuda.memory().free
    costs = measure_costs(cuda)
    assert set(costs) == set(DRIVER_CALLS[:-2])
    assert all(ns >= 0 for curve in costs.values() for _, ns in curve)
    assert {curve[0][0] for curve in costs.values()} == {2 * MIB}
    if driver is not None:
        assert cuda.memory().free == free
        assert driver.violations() == []
