"""Simulated devices of one machine: peers, page-locked host memory, memory that others take, and captures."""

import math

import pytest

from asyncmem.devices import Latencies, Simulated, StreamOrderError
from asyncmem.devices.host_memory import bytes_at
from asyncmem.errors import DeviceError, InvalidRequest, OutOfMemoryError

MIB = 1 << 20


def make(*, backing: bool = False, beside: Simulated | None = None, index: int = 0) -> Simulated:
    """Make a device whose calls take no time."""
    return Simulated(8 * MIB, latencies=Latencies.zero(), backing=backing, beside=beside, index=index)


def test_devices_of_one_machine_have_no_address_and_no_stream_in_common() -> None:
    """Their work cannot be mistaken for each other's."""
    first = make()
    second = make(beside=first, index=1)
    assert first.allocate_segment(MIB).address != second.allocate_segment(MIB).address
    assert first.create_stream().handle != second.create_stream().handle
    assert first.default_stream.timeline_key != second.default_stream.timeline_key


def test_fence_of_the_other_device_orders_a_copy_between_both() -> None:
    """Without the wait the checker objects, with it the bytes arrive."""
    first = make(backing=True)
    second = make(backing=True, beside=first, index=1)
    source, target = first.allocate_segment(4096), second.allocate_segment(4096)
    second.grant_access([first])
    first.fill(source.address, 4096, 7, first.default_stream)
    second.fill(target.address, 4096, 0, second.default_stream)
    with pytest.raises(StreamOrderError, match="used out of order"):
        second.peer_copy(target.address, source.address, 4096, first, first.default_stream)
    first.default_stream.wait(second.default_stream.record())
    second.peer_copy(target.address, source.address, 4096, first, first.default_stream)
    back = bytearray(4096)
    first.default_stream.synchronize_blocking()
    second.copy_out(memoryview(back), target.address, second.default_stream)
    assert back == b"\x07" * 4096


def test_memory_is_closed_to_devices_without_access() -> None:
    """A stream of another device may touch a segment only once its device has been granted access."""
    first = make()
    second = make(beside=first, index=1)
    segment = first.allocate_segment(4096, "direct")
    with pytest.raises(StreamOrderError, match="no access"):
        second.default_stream.launch(reads=[(segment.address, 4096)])
    first.grant_access([second])
    second.default_stream.launch(reads=[(segment.address, 4096)])


def test_copies_of_pinned_memory_are_checked_on_both_sides() -> None:
    """Page-locked memory is still read by the copy until that is done, whatever stream writes there next."""
    device = make()
    pinned = device.pinned()
    assert pinned is device.pinned()
    assert pinned.pinned() is pinned
    host, there = pinned.allocate_segment(4096), device.allocate_segment(4096)
    stream, other = device.create_stream(), device.create_stream()
    stream.wait(device.default_stream.record())
    pinned.fill(host.address, 4096, 1, stream)
    stream.launch(1.0)
    device.copy_in(there.address, memoryview(bytes_at(host.address, 4096)), stream)
    with pytest.raises(StreamOrderError, match="used out of order"):
        pinned.fill(host.address, 4096, 2, other)


def test_memory_taken_elsewhere_is_not_to_be_had() -> None:
    """Other processes' memory counts, and where they take what is in use, the driver says so."""
    device = make()
    device.take_elsewhere("6 MiB")
    assert device.memory().free == 2 * MIB
    with pytest.raises(OutOfMemoryError) as caught:
        device.allocate_segment(3 * MIB)
    assert caught.value.facts.device_free == 2 * MIB
    device.allocate_segment(2 * MIB)
    assert device.over_budget == 0
    device.take_elsewhere(MIB)
    assert (device.over_budget, device.memory().free) == (1, 0)
    device.give_back_elsewhere(7 * MIB)
    assert device.memory().free == 6 * MIB
    with pytest.raises(InvalidRequest, match="that others have"):
        device.give_back_elsewhere(1)


def test_captured_work_runs_when_it_is_launched_and_not_before() -> None:
    """A graph does to memory, and costs in time, what was captured, as often as it is launched."""
    device = make(backing=True)
    segment = device.allocate_segment(4096)
    stream = device.default_stream
    stream.begin_capture()
    stream.launch(0.5, writes=[(segment.address, 4096)])
    device.fill(segment.address, 4096, 9, stream)
    assert stream.capturing()
    graph = stream.end_capture()
    back = bytearray(4096)
    device.copy_out(memoryview(back), segment.address, stream)
    assert back == bytes(4096)
    assert not stream.capturing()
    graph.launch(stream)
    graph.launch(stream)
    device.copy_out(memoryview(back), segment.address, stream)
    assert back == b"\x09" * 4096
    assert (len(graph), graph.records) == (2, 0)
    stream.synchronize_blocking()
    assert device.now == 1.0


def test_replays_are_seen_by_the_order_checker() -> None:
    """Launching a graph is work on the stream that it is launched on."""
    device = make()
    segment = device.allocate_segment(4096)
    stream, other = device.create_stream(), device.create_stream()
    stream.begin_capture()
    stream.launch(writes=[(segment.address, 4096)])
    graph = stream.end_capture()
    for one in (stream, other):
        one.wait(device.default_stream.record())
    graph.launch(stream)
    with pytest.raises(StreamOrderError, match="used out of order"):
        graph.launch(other)


def test_mark_in_a_capture_is_no_fence() -> None:
    """It cannot be waited for by the host; a stream that waits for it joins the capture, which counts it."""
    device = make()
    stream, joined = device.create_stream(), device.create_stream()
    stream.begin_capture()
    mark = stream.record()
    with pytest.raises(DeviceError, match="CAPTURED_EVENT"):
        mark.done()
    joined.wait(mark)
    joined.launch(math.inf)
    graph = stream.end_capture()
    assert not joined.capturing()
    assert (len(graph), graph.records) == (1, 1)


def test_capture_that_waits_for_work_outside_of_it_is_broken() -> None:
    """As in CUDA: the wait is refused, and so is the end."""
    device = make()
    stream = device.create_stream()
    fence = device.default_stream.record()
    stream.begin_capture()
    with pytest.raises(DeviceError, match="ISOLATION"):
        stream.wait(fence)
    with pytest.raises(DeviceError, match="ISOLATION"):
        stream.end_capture()
    assert not stream.capturing()


def test_captures_begin_and_end_once() -> None:
    """Anything else is a wrong call."""
    stream = make().default_stream
    with pytest.raises(InvalidRequest, match="being captured"):
        stream.end_capture()
    stream.begin_capture()
    with pytest.raises(InvalidRequest, match="not being captured yet"):
        stream.begin_capture()
    graph = stream.end_capture()
    stream.begin_capture()
    with pytest.raises(InvalidRequest, match="not being captured itself"):
        graph.launch(stream)
