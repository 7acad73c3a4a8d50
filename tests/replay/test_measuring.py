"""What driver calls cost is measured on a device: the sums are right, and nothing stays taken, whatever fails."""

from contextlib import closing

import pytest

from asyncmem import DeviceError, OutOfMemoryError
from asyncmem.core import DRIVER_CALLS
from asyncmem.devices import Host, Latencies, Simulated
from asyncmem.replay import Model, Policy, measure_costs, replay

from .programs import MIB, random_program

GIB = 1 << 30
US = 1e-6


def dear(size: int) -> Latencies:
    """Make a driver whose calls take longer the more they are about, each at its own rate."""

    def curve(small: float, large: float) -> tuple[tuple[int, float], ...]:
        return ((2 * MIB, small * US), (size, large * US))

    return Latencies(
        create=curve(11, 90), set_access=curve(40, 130), unmap=curve(20, 20), release=curve(20, 310),
        allocate_stream_ordered=curve(50, 900), allocate_direct=curve(35, 80), free=curve(25, 400),
    )  # fmt: skip


@pytest.mark.parametrize("size", [64 * MIB, GIB])
def test_what_comes_moves_and_goes_costs_what_it_takes(size: int) -> None:
    """A piece of memory by its several calls, a segment by one; at every size that was measured."""
    latencies = dear(GIB)
    device = Simulated(80 * GIB, latencies=latencies)
    costs = {call: dict(curve) for call, curve in measure_costs(device).items()}

    def taken(*calls: str) -> float:
        return sum(latencies.of(call, size) for call in calls)

    def said(*calls: str) -> float:
        return sum(costs[f"cuMem{call}"][size] for call in calls) / 1e9

    assert said("Create", "Map", "SetAccess") == pytest.approx(taken("create", "map", "set_access"))
    assert said("Unmap", "Map", "SetAccess") == pytest.approx(taken("unmap", "map", "set_access"))
    assert said("Unmap", "Release") == pytest.approx(taken("unmap", "release"))
    assert said("AllocAsync") == pytest.approx(taken("allocate_stream_ordered"))
    assert said("Alloc") == pytest.approx(taken("allocate_direct"))
    assert said("Free") == said("FreeAsync") == pytest.approx(taken("free"))


def test_a_replay_reckons_with_them() -> None:
    """Where dear calls take ten times as long, so do those of a program that moves nothing."""
    program = random_program(1, [30 * MIB, 64 * MIB], steps=200, streams=1)
    spent = []
    for factor in (5, 50):  # where calls are dear at all, as few are made as can be
        slow = Latencies(
            **{
                name: tuple((nbytes, factor * seconds) for nbytes, seconds in getattr(dear(GIB), name))
                for name in ("create", "set_access", "unmap", "release")
            }
        )
        costs = measure_costs(Simulated(80 * GIB, latencies=slow))
        spent.append(replay(program, Policy.parse("paged,take_back=off"), Model(pace=0, costs=costs)).driver_seconds)
    assert spent[1] == pytest.approx(10 * spent[0], rel=0.02)  # mapping and fences cost what they did


def test_only_what_a_device_has_is_measured() -> None:
    """The host maps no pages, and has nothing in the order of a stream."""
    with closing(Host()) as host:
        assert set(measure_costs(host)) == {"cuMemAlloc", "cuMemFree"}
    assert set(measure_costs(Simulated(80 * GIB))) < set(DRIVER_CALLS)


def test_a_small_device_is_asked_for_small_things() -> None:
    """No more than half of what is free is out at any time, four pieces at once."""
    device = Simulated(300 * MIB)
    device.take_elsewhere(100 * MIB)
    sizes = {call: [nbytes // MIB for nbytes, _ in curve] for call, curve in measure_costs(device).items()}
    assert sizes["cuMemCreate"] == [2, 20]
    assert sizes["cuMemAlloc"] == [2, 20, 64]


def test_a_device_without_room_says_so() -> None:
    """Nothing can be measured where not even the smallest things fit."""
    with pytest.raises(OutOfMemoryError, match="simulated"):
        measure_costs(Simulated(12 * MIB))


CALLED = ("reserve", "create", "map", "set_access", "unmap", "release", "allocate_segment", "record")


@pytest.mark.parametrize("call", CALLED)
def test_a_call_that_fails_leaves_nothing(call: str) -> None:
    """Be it the first, the last or one between; the error is the device's."""
    whole = Simulated(GIB)
    measure_costs(whole)
    times = whole.log.counts[call]
    for nth in {1, times // 2, times}:
        device = Simulated(GIB)
        device.fail(call, nth)
        with pytest.raises(DeviceError, match=call):
            measure_costs(device)
        assert device.reserved == 0
