"""Each driver call of each operation fails once: what had been done is undone, and the same works the next time."""

import gc
import warnings
import weakref
from collections.abc import Callable
from contextlib import ExitStack

import pytest

from asyncmem.devices import Cuda, Segment
from asyncmem.devices.gpu.device import Gpu
from asyncmem.devices.gpu.segments import OrderedSegments
from asyncmem.errors import AsyncmemError, AsyncmemWarning, DeviceError, InvalidRequest, OutOfMemoryError

from .fake import FakeDriver

pytestmark = pytest.mark.fake_only

MIB = 1 << 20

OUT_OF_MEMORY, ALREADY_ENABLED, UNKNOWN = 2, 704, 999

Operation = Callable[[Gpu, ExitStack], object]


def take(kind: str) -> Operation:
    def operation(device: Gpu, stack: ExitStack) -> None:
        segment = device.allocate_segment(70 * MIB, kind)
        stack.callback(device.free_segment, segment)
        stack.callback(device.default_stream.synchronize_blocking)

    return operation


def take_pinned(device: Gpu, stack: ExitStack) -> None:
    pinned = device.pinned()
    stack.callback(pinned.free_segment, pinned.allocate_segment(MIB))


def create_stream(device: Gpu, stack: ExitStack) -> None:
    stack.callback(weakref.ref, device.create_stream())


def foreign_stream(device: Gpu, stack: ExitStack) -> None:
    handle = device.context.create_stream()
    stack.callback(device.context.destroy_stream, handle)
    assert not device.stream_of(handle).lasting


def fences(device: Gpu, stack: ExitStack) -> None:
    stream = device.default_stream
    fence = stream.record()
    assert fence.block(60)
    stack.callback(weakref.ref, fence)
    stream.wait(fence)
    assert not stream.capturing()


def fence_of_everything(device: Gpu, stack: ExitStack) -> None:
    fence = device.record_all()
    assert fence.block(60)
    stack.callback(weakref.ref, fence)


def notice(device: Gpu, stack: ExitStack) -> None:
    called: list[None] = []
    fence = device.default_stream.record()
    fence.notify(lambda: called.append(None))
    stack.callback(weakref.ref, fence)


def copies(device: Gpu, stack: ExitStack) -> None:
    stream = device.default_stream
    segment = device.allocate_segment(MIB, "direct")
    stack.callback(device.free_segment, segment)
    back = bytearray(4)
    stack.callback(stream.synchronize_blocking)
    device.fill(segment.address, 4, 7, stream)
    device.copy(segment.address + 8, segment.address, 4, stream)
    device.copy_in(segment.address, memoryview(b"1234"), stream)
    device.copy_out(memoryview(back), segment.address, stream)
    assert device.copy_holds_up(memoryview(back))
    stream.synchronize_blocking()


OPERATIONS: dict[str, Operation] = {
    **{f"take {kind}": take(kind) for kind in ("stream_ordered", "direct")},
    "take pinned": take_pinned,
    "open": lambda device, stack: stack.callback(type(device)(0).close),
    "open another": lambda device, stack: stack.callback(type(device)(1).close),
    "create a stream": create_stream,
    "name a stream": foreign_stream,
    "memory": lambda device, _: device.memory(),
    "fences": fences,
    "a fence of everything": fence_of_everything,
    "notice": notice,
    "copies": copies,
}


def calls_of(fake: FakeDriver, work: Callable[[], object]) -> int:
    before = fake.calls()
    work()
    return fake.calls() - before


def live(fake: FakeDriver) -> dict[str, int]:
    """What the driver holds, without how often the contexts are retained: the last to close makes up for the others."""
    return {kind: count for kind, count in fake.live().items() if kind != "contexts"}


def run(device: Gpu, operation: Operation) -> None:
    with ExitStack() as stack:
        operation(device, stack)


@pytest.mark.every_vendor
@pytest.mark.parametrize("code", [OUT_OF_MEMORY, UNKNOWN])
@pytest.mark.parametrize("name", OPERATIONS)
def test_nothing_is_left_of_an_operation_that_fails(fake: FakeDriver, pair: Gpu, name: str, code: int) -> None:
    """Whichever call fails, the error says so, no memory stays with the driver, and the next try succeeds."""
    operation = OPERATIONS[name]
    run(pair, operation)
    used = fake.used()
    gc.collect()
    left = live(fake)
    failed = 0
    for nth in range(1, calls_of(fake, lambda: run(pair, operation)) + 1):
        with ExitStack() as stack:
            fake.fail("*", nth, code)
            try:
                operation(pair, stack)
            except AsyncmemError as error:  # a call that puts back what was before may fail unnoticed
                failed += isinstance(error, OutOfMemoryError | DeviceError)
            fake.clear_faults()
        if live(fake) != left:
            gc.collect()  # the error may be in a cycle with what it speaks of
        assert (fake.used(), live(fake)) == (used, left), f"after call {nth}"
        run(pair, operation)
    assert failed


@pytest.mark.every_vendor
@pytest.mark.parametrize("kind", ["stream_ordered", "direct", "pinned"])
def test_a_segment_that_could_not_go_back_goes_back_the_next_time(fake: FakeDriver, pair: Gpu, kind: str) -> None:
    """Half of the way back is not walked twice: the second try does what is left, and nothing is left then."""
    device = pair.pinned() if kind == "pinned" else pair

    def make() -> Segment:
        segment = device.allocate_segment(70 * MIB, kind)
        device.default_stream.synchronize_blocking()
        return segment

    first = make()
    calls = calls_of(fake, lambda: device.free_segment(first))
    left = fake.live()
    failed = 0
    for nth in range(1, calls + 1):
        segment = make()
        fake.fail("*", nth, UNKNOWN)
        try:
            device.free_segment(segment)
        except DeviceError:
            failed += 1
            fake.clear_faults()
            device.free_segment(segment)
        fake.clear_faults()
        assert (fake.used(), fake.live()) == (0, left), f"after call {nth}"
        with pytest.raises(InvalidRequest, match="given back"):
            device.free_segment(segment)
    assert failed


def may_use(peer: Gpu, device: Gpu, segment: Segment) -> bool:
    """Ask the driver whether another device has access to a segment of this one."""
    there = device.driver.access(peer.index)
    with peer.context.entered():
        if segment.kind == "stream_ordered":
            source = device._segments.opened(segment.kind)
            assert isinstance(source, OrderedSegments)
            return int(device.driver.call("cuMemPoolGetAccess", source._pool, there.location)) == 3
        try:
            peer.driver.call("cuCtxEnablePeerAccess", device.driver.home(device.context), 0)
        except DeviceError as error:
            return error.code == ALREADY_ENABLED
        peer.driver.call("cuCtxDisablePeerAccess", device.driver.home(device.context))
        return False


@pytest.mark.every_vendor
@pytest.mark.parametrize("kind", ["stream_ordered", "direct"])
def test_access_is_granted_to_all_segments_or_to_none(fake: FakeDriver, pair: Gpu, kind: str) -> None:
    """After a grant that failed no peer has access anywhere; after the next one it has, to later segments too."""
    device = pair
    peer = type(device)(1)
    segments = [device.allocate_segment(300 * MIB, kind), device.allocate_segment(2 * MIB, kind)]
    device.default_stream.synchronize_blocking()
    failed = 0
    while True:
        fake.fail("*", failed + 1, UNKNOWN)
        try:
            device.grant_access([peer])
        except DeviceError:
            failed += 1
            fake.clear_faults()
            assert not any(may_use(peer, device, segment) for segment in segments), f"after call {failed}"
        else:
            break
    fake.clear_faults()
    segments.append(device.allocate_segment(2 * MIB, kind))
    device.default_stream.synchronize_blocking()
    assert all(may_use(peer, device, segment) for segment in segments)
    assert failed > 1
    for segment in segments:
        device.free_segment(segment)
    peer.close()


def test_a_closed_device_is_closed_whatever_the_driver_says(fake: FakeDriver) -> None:
    """Calls that fail while a device closes become warnings, and close it nevertheless."""

    def open_and_use() -> Cuda:
        device = Cuda(0)
        for kind in device.segment_kinds:
            segment = device.allocate_segment(MIB, kind)
            device.default_stream.synchronize_blocking()
            device.free_segment(segment)
        return device

    device = open_and_use()
    for nth in range(1, calls_of(fake, device.close) + 1):
        device = open_and_use()
        fake.fail("*", nth, UNKNOWN)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            device.close()
        fake.clear_faults()
        assert {one.category for one in caught} <= {AsyncmemWarning}
        with pytest.raises(InvalidRequest, match="open"):
            device.allocate_segment(MIB)
    fake.reset()
