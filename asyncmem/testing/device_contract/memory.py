"""Clock, segments and copies."""

import gc
import itertools

import pytest

from asyncmem.devices import Device
from asyncmem.errors import InvalidRequest, OutOfMemoryError
from asyncmem.testing.device_contract.rig import MIB, Rigged


class ClockContract(Rigged):
    """Time goes forward."""

    def test_the_clock_goes_forward_until_what_is_waited_for_is_done(self, device: Device) -> None:
        """Two readings around a piece of work are in order."""
        before = device.now
        segment = device.allocate_segment(MIB)
        device.fill(segment.address, MIB, 1, device.default_stream)
        device.default_stream.synchronize_blocking()
        assert device.now >= before
        device.free_segment(segment)


class SegmentsContract(Rigged):
    """Memory comes from the driver and goes back, once."""

    def test_a_segments_size_is_rounded_up_to_the_granularity(self, device: Device) -> None:
        """A segment has at least the bytes asked for, in whole granules."""
        segment = device.allocate_segment(1)
        assert segment.nbytes == device.granularity
        assert segment.address % device.granularity == 0
        device.free_segment(segment)

    def test_auto_is_the_first_kind_and_direct_is_always_there(self, device: Device) -> None:
        """A pool may ask for "auto" or "direct" without knowing the device."""
        segments = [device.allocate_segment(MIB, kind) for kind in ("auto", "direct")]
        assert [segment.kind for segment in segments] == [device.segment_kinds[0], "direct"]
        for segment in segments:
            device.free_segment(segment)

    def test_segments_do_not_overlap(self, device: Device) -> None:
        """Two segments have no byte in common."""
        segments = sorted((device.allocate_segment(MIB) for _ in range(8)), key=lambda segment: segment.address)
        for low, high in itertools.pairwise(segments):
            assert low.address + low.nbytes <= high.address
        for segment in segments:
            device.free_segment(segment)

    def test_a_segment_goes_back_once(self, device: Device) -> None:
        """What is not out cannot be given back."""
        segment = device.allocate_segment(MIB)
        device.free_segment(segment)
        with pytest.raises(InvalidRequest, match="not given back yet"):
            device.free_segment(segment)

    def test_a_segment_stays_until_it_is_given_back(self, device: Device) -> None:
        """Dropping the record of a segment unmaps nothing: buffers may still lie there."""
        address = device.allocate_segment(MIB).address
        gc.collect()
        back = bytearray(1)
        device.fill(address, MIB, 7, device.default_stream)
        device.copy_out(memoryview(back), address, device.default_stream)
        device.default_stream.synchronize_blocking()
        assert back == b"\x07"

    @pytest.mark.parametrize("nbytes", [0, -1])
    def test_refuses_sizes_that_are_not_positive(self, device: Device, nbytes: int) -> None:
        """A segment has bytes."""
        with pytest.raises(InvalidRequest, match="positive"):
            device.allocate_segment(nbytes)

    def test_refuses_a_kind_it_does_not_have(self, device: Device) -> None:
        """An unknown kind is named, with those there are."""
        with pytest.raises(InvalidRequest, match="imaginary"):
            device.allocate_segment(MIB, "imaginary")

    def test_too_much_is_out_of_memory_and_changes_nothing(self, device: Device) -> None:
        """After a refusal the device goes on as before."""
        with pytest.raises(OutOfMemoryError) as caught:
            device.allocate_segment(1 << 46)
        assert caught.value.asked == 1 << 46
        device.free_segment(device.allocate_segment(MIB))

    def test_memory_tells_what_is_free_of_how_much(self, device: Device) -> None:
        """Free memory is a part of the total."""
        info = device.memory()
        assert 0 < info.free <= info.total == device.capacity

    def test_driver_calls_are_counted(self, device: Device) -> None:
        """Getting a segment and giving it back are driver calls."""
        before = device.driver_calls
        device.free_segment(device.allocate_segment(MIB))
        assert device.driver_calls >= before + 2


class CopiesContract(Rigged):
    """Bytes arrive as they are, in order."""

    def test_bytes_come_back_as_they_went_in(self, device: Device) -> None:
        """Copies in, across and out keep each byte, in the order of the stream."""
        stream = device.create_stream()
        segment = device.allocate_segment(2 * MIB, stream=stream)
        data = bytes(range(256)) * 16
        back = bytearray(len(data))
        device.copy_in(segment.address, memoryview(data), stream)
        device.copy(segment.address + MIB, segment.address, len(data), stream)
        device.copy_out(memoryview(back), segment.address + MIB, stream)
        stream.synchronize_blocking()
        assert back == data
        device.free_segment(segment)

    def test_fill_sets_exactly_its_range(self, device: Device) -> None:
        """The bytes before and behind stay."""
        stream = device.default_stream
        segment = device.allocate_segment(MIB)
        back = bytearray(4)
        device.fill(segment.address, 4, 1, stream)
        device.fill(segment.address + 1, 2, 9, stream)
        device.copy_out(memoryview(back), segment.address, stream)
        stream.synchronize_blocking()
        assert list(back) == [1, 9, 9, 1]
        device.free_segment(segment)

    def test_waiting_orders_a_copy_behind_another_streams(self, device: Device) -> None:
        """What stream a wrote before its fence is there for stream b behind it."""
        a, b = device.create_stream("a"), device.create_stream("b")
        segment = device.allocate_segment(MIB, stream=a)
        back = bytearray(1)
        device.fill(segment.address, MIB, 7, a)
        b.wait(a.record())
        device.copy_out(memoryview(back), segment.address, b)
        b.synchronize_blocking()
        assert back == b"\x07"
        device.free_segment(segment)

    def test_refuses_host_memory_that_it_cannot_use(self, device: Device) -> None:
        """A target must be writable, and both sides contiguous."""
        stream = device.default_stream
        segment = device.allocate_segment(MIB)
        with pytest.raises(InvalidRequest, match="writable"):
            device.copy_out(memoryview(b"read only"), segment.address, stream)
        with pytest.raises(InvalidRequest, match="contiguous"):
            device.copy_in(segment.address, memoryview(b"every other")[::2], stream)
        device.free_segment(segment)
