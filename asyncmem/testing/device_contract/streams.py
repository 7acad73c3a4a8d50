"""Streams by what means them, and the end of a device."""

import threading

import pytest

from asyncmem.devices import Device, Host, Simulated
from asyncmem.errors import InvalidRequest
from asyncmem.testing.device_contract.rig import MIB, Rig, Rigged


class Numbered:
    """A foreign library's stream, which offers its handle as CUDA streams do."""

    def __init__(self, version: int, handle: int) -> None:
        self._offer = (version, handle)

    def __cuda_stream__(self) -> tuple[int, int]:
        return self._offer


class StreamsContract(Rigged):
    """What means a stream finds it."""

    def test_streams_are_found_by_what_means_them(self, device: Device) -> None:
        """None, a stream, its handle, and an object with `__cuda_stream__` all name one stream."""
        stream = device.create_stream()
        assert device.stream_of(None) is device.default_stream
        assert device.stream_of(0) is device.default_stream
        for source in (stream, stream.handle, Numbered(0, stream.handle)):
            assert device.stream_of(source) is stream

    @pytest.mark.parametrize("source", [True, 1.0, "stream-1", -1, Numbered(1, 0), Numbered(0, 999_999), object])
    def test_refuses_what_means_no_stream(self, device: Device, source: object) -> None:
        """What names no live stream of this device is a wrong argument."""
        with pytest.raises(InvalidRequest, match="stream"):
            device.stream_of(source)

    def test_refuses_another_devices_stream(self, device: Device) -> None:
        """A stream orders only its own device's memory."""
        stranger: Device = Simulated() if isinstance(device, Host) else Host()
        with pytest.raises(InvalidRequest, match=device.name):
            device.stream_of(stranger.default_stream)
        with pytest.raises(InvalidRequest, match=device.name):
            device.stream_of(Simulated().default_stream)

    def test_streams_keep_the_name_they_were_given(self, device: Device) -> None:
        """Names show up in messages; a stream without one gets its own."""
        assert device.create_stream("decode").name == "decode"
        assert device.create_stream().name != device.create_stream().name

    def test_synchronize_blocking_waits_for_all_work(self, rig: Rig) -> None:
        """Once it returns, everything submitted before is complete."""
        stream = rig.device.create_stream()
        rig.occupy(stream)
        fence = stream.record()
        rig.release()
        stream.synchronize_blocking()
        assert fence.done()


class ClosingContract(Rigged):
    """A closed device leaves nothing running."""

    def test_closing_twice_is_fine_and_ends_all_threads(self, rig: Rig) -> None:
        """A closed device has no thread left, and its queued work was done."""
        before = set(threading.enumerate())
        stream = rig.device.create_stream()
        rig.occupy(stream)
        fence = stream.record()
        fence.notify(lambda: None)
        rig.release()
        rig.device.close()
        rig.device.close()
        assert fence.done()
        assert set(threading.enumerate()) <= before

    def test_closing_leaves_segments_valid(self, device: Device) -> None:
        """Buffers that are still held outlive the device's threads."""
        segment = device.allocate_segment(MIB)
        device.close()
        device.free_segment(segment)
