"""For devices with host memory beside them."""

import numpy as np

from asyncmem.devices import Device
from asyncmem.devices.host_memory import bytes_at
from asyncmem.testing.device_contract.contract import MIB, SOON, Rigged


class PinnedContract(Rigged):
    """Host memory beside a device is used by both sides."""

    def test_pinned_memory_has_the_streams_of_its_device(self, device: Device) -> None:
        """A stream of the device is one of its page-locked memory, by whatever means it."""
        stream = device.create_stream()
        pinned = device.pinned()
        assert pinned.default_stream is device.default_stream
        assert pinned.stream_of(stream) is stream
        assert pinned.stream_of(stream.handle) is stream
        assert device.stream_of(pinned.create_stream()).device is stream.device

    def test_pinned_memory_is_read_and_written_by_its_devices_copies_and_by_the_host(self, device: Device) -> None:
        """What the host writes there arrives on the device, and what comes back is read there."""
        pinned, stream = device.pinned(), device.create_stream()
        assert pinned.host_readable
        there, here = device.allocate_segment(MIB, stream=stream), pinned.allocate_segment(MIB, stream=stream)
        view = bytes_at(here.address, 2 * 256)
        view[:256] = np.arange(256)
        device.copy_in(there.address, view[:256].data, stream)
        device.copy_out(view[256:].data, there.address, stream)
        assert stream.record().block(SOON)
        assert list(view[256:]) == list(range(256))
        pinned.free_segment(here)
        device.free_segment(there)

    def test_pinned_memory_does_work_of_its_own_in_the_order_of_the_devices_streams(self, device: Device) -> None:
        """It fills and copies as any device, and a fence of it is one of its device."""
        pinned, stream = device.pinned(), device.create_stream()
        segment = pinned.allocate_segment(MIB, stream=stream)
        pinned.fill(segment.address, 8, 7, stream)
        pinned.copy(segment.address + 8, segment.address, 8, stream)
        stream.wait(pinned.record_all())
        assert device.record_all().block(SOON)
        assert set(bytes_at(segment.address, 16)) == {7}
        pinned.free_segment(segment)

    def test_pinned_memory_is_one_and_the_same_while_it_is_used(self, device: Device) -> None:
        """Two calls share it, and it is its own page-locked memory."""
        pinned = device.pinned()
        assert device.pinned() is pinned
        assert pinned.pinned() is pinned

    def test_pinned_memory_ends_with_its_device_and_not_before(self, device: Device) -> None:
        """Closing it is left to the device."""
        pinned = device.pinned()
        if pinned is not device:
            pinned.close()
        segment = pinned.allocate_segment(MIB)
        device.close()
        pinned.free_segment(segment)
