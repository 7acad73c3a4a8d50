"""Memory that moves under reserved addresses, call by call: what fails, what others feel, and who may use it."""

import contextlib
import ctypes
import itertools
import sys
import threading
import time
from collections.abc import Callable

import pytest

from asyncmem.devices import Cuda
from asyncmem.devices.gpu.device import Gpu
from asyncmem.errors import DeviceError, InvalidRequest, OutOfMemoryError

from .fake import FakeDriver

pytestmark = pytest.mark.fake_only

MIB = 1 << 20
RANGE = 512 * MIB

OUT_OF_MEMORY, UNKNOWN = 2, 999


def calls_of(fake: FakeDriver, work: Callable[[], object]) -> dict[str, int]:
    names = ("cuMemCreate", "cuMemMap", "cuMemSetAccess", "cuMemUnmap", "cuMemRelease")
    before = {name: fake.calls(name) for name in names}
    work()
    return {name: fake.calls(name) - count for name, count in before.items() if fake.calls(name) > count}


def spans(start: int, *sizes: int) -> list[tuple[int, int]]:
    """Pieces of so many MiB, one behind the other."""
    places = itertools.accumulate(sizes, initial=0)
    return [(start + place * MIB, size * MIB) for place, size in zip(places, sizes, strict=False)]


class TestCalls:
    def test_neighbours_share_calls(self, fake: FakeDriver, gpu: Gpu) -> None:
        """Pieces that lie one behind the other share a call, of which none is for more than 256 MiB."""
        start = gpu.reserve(RANGE)
        here, there = spans(start, 4, 2, 64), spans(start + 128 * MIB, *[32] * 9)
        made = calls_of(fake, lambda: gpu.remap([], here + there))
        assert made == {"cuMemCreate": 12, "cuMemMap": 12, "cuMemSetAccess": 3}
        gone = calls_of(fake, lambda: gpu.remap(here + there, []))
        assert gone == {"cuMemUnmap": 3, "cuMemRelease": 12}
        gpu.unreserve(start, RANGE)

    def test_memory_that_could_not_be_released_goes_with_its_range(self, fake: FakeDriver, gpu: Gpu) -> None:
        """All other memory goes at once, and what is left is tried again before the range goes back."""
        start = gpu.reserve(RANGE)
        here = spans(start, 2, 2, 4)
        gpu.remap([], here)
        fake.fail("cuMemRelease", 1, UNKNOWN)
        assert calls_of(fake, lambda: gpu.remap(here, [])) == {"cuMemUnmap": 1, "cuMemRelease": 3}
        assert fake.used() == 2 * MIB
        gpu.unreserve(start, RANGE)
        assert fake.used() == 0

    def test_moving_neither_makes_nor_releases_memory(self, fake: FakeDriver, gpu: Gpu) -> None:
        """A move is a mapping, and its part of the calls that unmap and set access for neighbours."""
        start = gpu.reserve(RANGE)
        here, there = spans(start, 4, 2), spans(start + 128 * MIB, 2, 4)
        gpu.remap([], here)
        assert calls_of(fake, lambda: gpu.remap(here, there)) == {
            "cuMemMap": 2,
            "cuMemSetAccess": 1,
            "cuMemUnmap": 1,
        }
        assert calls_of(fake, lambda: gpu.remap(there, [])) == {"cuMemUnmap": 1, "cuMemRelease": 2}
        gpu.unreserve(start, RANGE)

    def test_on_a_full_card_what_was_unmapped_makes_room(self, fake: FakeDriver, gpu: Gpu) -> None:
        """Memory of another size is made once the old is released, and not before."""
        start = gpu.reserve(RANGE)
        here, there = spans(start, 16), spans(start + 128 * MIB, 2, 4)
        gpu.remap([], here)
        fake.others(gpu.capacity - 16 * MIB)
        assert gpu.remap(here, there).error is None
        refused = gpu.remap(spans(start + 128 * MIB, 2), spans(start, 64))
        assert isinstance(refused.error, OutOfMemoryError)
        assert (refused.unmapped, refused.mapped, fake.used()) == (1, 0, 4 * MIB)
        gpu.remap(there[1:], [])
        gpu.unreserve(start, RANGE)

    def test_a_move_sets_access_at_its_new_address(self, fake: FakeDriver, gpu: Gpu) -> None:
        """Neighbours there share the call; the memory is released with its last address."""
        start = gpu.reserve(RANGE)
        here, there = spans(start, 4, 2), spans(start + 128 * MIB, 4, 2)
        gpu.remap([], here)
        moves = [(span, address) for span, (address, _) in zip(here, there, strict=True)]
        assert calls_of(fake, lambda: gpu.remap([], [], moves)) == {"cuMemMap": 2, "cuMemSetAccess": 1}
        assert calls_of(fake, lambda: gpu.remap(here, [])) == {"cuMemUnmap": 1}
        assert calls_of(fake, lambda: gpu.remap(there, [])) == {"cuMemUnmap": 1, "cuMemRelease": 2}
        gpu.unreserve(start, RANGE)

    def test_all_is_done_in_one_go(self, fake: FakeDriver, gpu: Gpu) -> None:
        """Once begun, all its calls are made while another thread keeps the interpreter's lock to itself."""
        start = gpu.reserve(RANGE)
        here, there = spans(start, *[2] * 8), spans(start + 128 * MIB, *[2] * 8)
        gpu.remap([], here)
        calls = ctypes.PyDLL(str(fake.path)).fake_calls  # keeps the lock, too
        fake.latency("cuMemUnmap", 1_000_000)
        begun, wanted = fake.calls("cuMemUnmap"), fake.calls("cuMemSetAccess") + 1
        thread = threading.Thread(target=lambda: gpu.remap(here, there))
        interval = sys.getswitchinterval()
        sys.setswitchinterval(100)
        try:
            thread.start()
            while fake.calls("cuMemUnmap") == begun:
                time.sleep(0)
            deadline = time.monotonic() + 60
            while calls(b"cuMemSetAccess") < wanted and time.monotonic() < deadline:
                pass
            assert calls(b"cuMemSetAccess") == wanted
        finally:
            sys.setswitchinterval(interval)
            thread.join()
        gpu.remap(there, [])
        gpu.unreserve(start, RANGE)

    def test_a_device_without_pages_says_so(self, fake: FakeDriver) -> None:
        """Where the driver maps nothing, or a memory checker listens, there are segments alone."""
        fake.attribute(0, 102, 0)
        device = Cuda(0)
        assert device.page == 0
        with pytest.raises(InvalidRequest, match="pages"):
            device.reserve(RANGE)
        device.close()


@pytest.mark.every_vendor
class TestFaults:
    @pytest.mark.parametrize("times", [1, 2, 5])
    @pytest.mark.parametrize("code", [OUT_OF_MEMORY, UNKNOWN])
    def test_what_is_told_is_so(self, fake: FakeDriver, pair: Gpu, code: int, times: int) -> None:
        """Whichever call fails, and some after it: each span is as it was told, and the next try does the rest."""
        start = pair.reserve(RANGE)
        here = [*spans(start, 4, 4), *spans(start + 16 * MIB, 2), *spans(start + 32 * MIB, 64)]
        there = [*spans(start + 128 * MIB, 4, 2, 2), *spans(start + 256 * MIB, 2), *spans(start + 320 * MIB, 4)]
        pair.remap([], here)
        before = fake.calls()
        assert pair.remap(here, there).error is None
        calls = fake.calls() - before
        pair.remap(there, [])
        failed = 0
        for nth in range(1, calls + 1):
            pair.remap([], here)
            fake.fail("*", nth, code, times)
            unmapped, mapped = 0, 0
            with contextlib.suppress(DeviceError):  # where it cannot even begin
                done = pair.remap(here, there)
                unmapped, mapped = done.unmapped, done.mapped
                failed += isinstance(done.error, DeviceError | OutOfMemoryError)
            fake.clear_faults()
            for address, nbytes in here[unmapped:] + there[:mapped]:
                pair.fill(address, nbytes, 1, pair.default_stream)
            pair.default_stream.synchronize_blocking()
            assert pair.remap(here[unmapped:], there[mapped:]).error is None
            assert fake.used() == sum(nbytes for _, nbytes in there), f"after call {nth}"
            assert pair.remap(there, []).error is None
            assert fake.used() == 0
        spared = 2 * ((code, times) == (OUT_OF_MEMORY, 1))  # it is made once what was unmapped is released
        assert failed >= 14 - spared  # 3 stretches unmapped, 2 created, 5 mapped, 3 times access, 1 released
        pair.unreserve(start, RANGE)

    @pytest.mark.parametrize("times", [1, 2, 5])
    @pytest.mark.parametrize("code", [OUT_OF_MEMORY, UNKNOWN])
    def test_what_is_told_of_moves_is_so(self, fake: FakeDriver, pair: Gpu, code: int, times: int) -> None:
        """Whichever call fails, and some after it: memory is where it was or where it is to be, and none is lost."""
        start = pair.reserve(RANGE)
        here = [*spans(start, 4, 2), *spans(start + 32 * MIB, 64), *spans(start + 16 * MIB, 6)]
        there = [*spans(start + 128 * MIB, 4, 2), *spans(start + 256 * MIB, 64)]
        out, into = [*here[:2], here[3]], [*spans(start + 320 * MIB, 2, 8)]
        moves = [(span, address) for span, (address, _) in zip(here, there, strict=False)]
        stream = pair.default_stream

        def begin() -> None:
            pair.remap([], here)
            for number, (address, nbytes) in enumerate(here):
                pair.fill(address + nbytes - 1, 1, number, stream)
            stream.synchronize_blocking()

        begin()
        before = fake.calls()
        assert pair.remap(out, into, moves).error is None
        calls = fake.calls() - before
        pair.remap([*there, here[2], *into], [])
        failed = 0
        for nth in range(1, calls + 1):
            begin()
            fake.fail("*", nth, code, times)
            moved, unmapped, mapped = 0, 0, 0
            with contextlib.suppress(DeviceError):  # where it cannot even begin
                done = pair.remap(out, into, moves)
                moved, unmapped, mapped = done.moved, done.unmapped, done.mapped
                failed += isinstance(done.error, DeviceError | OutOfMemoryError)
            fake.clear_faults()
            latest = [there[i] if i < moved else here[i] for i in range(3)] + [here[3]] * (unmapped < 3)
            for number, (address, nbytes) in enumerate(latest):
                at_end = bytearray(1)
                pair.copy_out(memoryview(at_end), address + nbytes - 1, stream)
                assert at_end[0] == number, f"after call {nth}"
            stream.synchronize_blocking()
            assert pair.remap(out[unmapped:], into[mapped:], moves[moved:]).error is None
            assert fake.used() == (4 + 2 + 64 + 2 + 8) * MIB, f"after call {nth}"
            assert pair.remap([*there, here[2], *into], []).error is None
            assert fake.used() == 0
        spared = 2 * ((code, times) == (OUT_OF_MEMORY, 1))  # as above
        # 2 stretches moved by 3 mappings, 2 unmapped, 2 created, 2 mapped, 1 access, 1 released
        assert failed >= 12 - spared
        pair.unreserve(start, RANGE)

    def test_a_range_that_could_not_go_back_goes_back_the_next_time(self, fake: FakeDriver, pair: Gpu) -> None:
        """It stays reserved, and is a use of the device until it has gone."""
        start = pair.reserve(RANGE)
        fake.fail("cuMemAddressFree", 1, UNKNOWN)
        with pytest.raises(DeviceError):
            pair.unreserve(start, RANGE)
        pair.unreserve(start, RANGE)
        fake.fail("cuMemAddressReserve", 1, OUT_OF_MEMORY)
        with pytest.raises(OutOfMemoryError):
            pair.reserve(RANGE)


@pytest.mark.every_vendor
class TestPeers:
    def may_use(self, device: Gpu, peer: Gpu, *addresses: int) -> list[bool]:
        there = device.driver.access(peer.index)
        with device.context.entered():
            return [int(device.driver.call("cuMemGetAccess", there.location, at)) == 3 for at in addresses]

    def test_access_is_granted_to_all_memory_or_to_none(self, fake: FakeDriver, pair: Gpu) -> None:
        """After a grant that failed no peer has access anywhere; after the next one it has, to later memory too."""
        peer = type(pair)(1)
        start = pair.reserve(RANGE)
        here = [*spans(start, 2, 4), *spans(start + 64 * MIB, 2)]
        pair.remap([], here)
        failed = 0
        while True:
            fake.fail("cuMemSetAccess", failed + 1, UNKNOWN)
            try:
                pair.grant_access([peer])
            except DeviceError:
                failed += 1
                fake.clear_faults()
                assert not any(self.may_use(pair, peer, *[address for address, _ in here])), f"after call {failed}"
            else:
                break
        fake.clear_faults()
        assert failed == (2 if pair.driver.joins_mappings else len(here))
        there = spans(start + 128 * MIB, 2, 8)
        pair.remap(here[:1], there)
        assert all(self.may_use(pair, peer, *[address for address, _ in here[1:] + there]))
        pair.remap(here[1:] + there, [])
        pair.unreserve(start, RANGE)
        peer.close()
