"""What the device contract promises, on every device of ours alike."""

import pytest

from asyncmem.devices import Device
from asyncmem.errors import InvalidRequest
from asyncmem.testing.device_contract import DeviceContract, PagesContract, PinnedContract


class TestContract(DeviceContract):
    @pytest.mark.parametrize("rig", ["host", "virtual", "wall", "opencl", "metal"], indirect=True)
    def test_a_forgotten_streams_handle_names_nobody_again(self, device: Device) -> None:
        """Where handles are ours, each is given to one stream only, so a stale one cannot name the wrong stream."""
        stream = device.create_stream()
        handle = stream.handle
        del stream
        assert handle not in {device.create_stream().handle for _ in range(4)}
        with pytest.raises(InvalidRequest):
            device.stream_of(handle)

    @pytest.mark.parametrize("rig", ["host", "virtual", "wall", "cuda"], indirect=True)
    def test_a_fence_of_an_idle_stream_is_reached_at_once(self, device: Device) -> None:
        """OpenCL and Metal take a moment: what is queued goes by way of the driver's thread."""
        fence = device.create_stream().record()
        assert fence.done()
        assert device.record_all().done()


def test_each_promise_has_a_name_of_its_own() -> None:
    """Otherwise one section of the contract would hide a promise of another."""
    sections = [DeviceContract, PagesContract, PinnedContract]
    names = [name for section in sections for name in vars(section) if name.startswith("test_")]
    assert len(names) == len(set(names))
    assert len(names) >= 50
