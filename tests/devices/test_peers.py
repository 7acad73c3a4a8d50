"""Memory that two devices use: page-locked host memory beside a device, and devices beside each other."""

from collections.abc import Callable

import pytest

from asyncmem.devices import Device, Host, Latencies, Simulated, StreamOrderError
from asyncmem.devices.host_memory import bytes_at
from asyncmem.errors import InvalidRequest
from asyncmem.testing.device_contract import PinnedContract

MIB = 1 << 20


def backed() -> Simulated:
    return Simulated(backing=True)


@pytest.fixture(params=[Host, backed], ids=["host", "simulated"])
def make(request: pytest.FixtureRequest) -> Callable[[], Device]:
    made: Callable[[], Device] = request.param
    return made


class TestPinned(PinnedContract):
    def test_without_backing_it_is_real_memory_nevertheless(self) -> None:
        """A program that fills a staging buffer needs no other for a device that only pretends."""
        pinned = Simulated().pinned()
        segment = pinned.allocate_segment(MIB)
        pinned.fill(segment.address, 4, 9, pinned.default_stream)
        assert list(bytes_at(segment.address, 4)) == [9] * 4


class TestPeers:
    def test_copy_from_each_other(self, make: Callable[[], Device]) -> None:
        """The bytes of one device arrive on another, in the order of a stream of either."""
        first, second = make(), make()
        source, target = first.allocate_segment(MIB), second.allocate_segment(MIB, "direct")
        back = bytearray(2)
        for at, stream in enumerate((first.create_stream(), second.create_stream())):
            first.fill(source.address, 1, 5 + at, first.default_stream)
            first.default_stream.synchronize_blocking()
            second.peer_copy(target.address + at, source.address, 1, first, stream)
            stream.synchronize_blocking()
        assert second.record_all().block()
        second.copy_out(memoryview(back), target.address, second.default_stream)
        second.default_stream.synchronize_blocking()
        assert list(back) == [5, 6]
        first.close()
        second.close()

    def test_grant_access_to_their_like_alone(self, make: Callable[[], Device]) -> None:
        """A device that cannot reach the memory is named."""
        device, like = make(), make()
        unlike: Device = Simulated() if isinstance(device, Host) else Host()
        device.grant_access([like])
        with pytest.raises(InvalidRequest, match="peers"):
            device.grant_access([like, unlike])
        with pytest.raises(InvalidRequest, match="source_device"):
            device.peer_copy(0, 0, 1, unlike, device.default_stream)

    def test_need_the_hosts_word_on_the_device_that_has_not_the_stream(self) -> None:
        """Two devices share no order but what the host has seen, and the simulation says where that is missing."""
        first, second = Simulated(autojump=False), Simulated()
        source, target = first.allocate_segment(MIB), second.allocate_segment(MIB, "direct")
        first.default_stream.launch(1.0, writes=[(source.address, 1)])
        with pytest.raises(StreamOrderError):
            second.peer_copy(target.address, source.address, 1, first, second.default_stream)

    def test_take_time_for_their_copies_where_they_are_told_to(self) -> None:
        """On the stream that copies, and on no other; the clock is that of all devices of the machine."""
        first = Simulated(latencies=Latencies.zero())
        second = Simulated(latencies=Latencies.zero(), beside=first, peer_rate=MIB)
        source, target = first.allocate_segment(2 * MIB, "direct"), second.allocate_segment(2 * MIB, "direct")
        stream = second.create_stream()
        first.grant_access([second])
        second.peer_copy(target.address, source.address, 2 * MIB, first, stream)
        assert second.default_stream.record().done()
        assert stream.record().block()
        assert first.now == second.now == 2.0
