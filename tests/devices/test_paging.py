"""Memory that is mapped under reserved addresses and moves there, on every device that has pages."""

import pytest

from asyncmem.devices import Fence, Host, Simulated, StreamOrderError
from asyncmem.errors import DeviceError, InvalidRequest
from asyncmem.testing.device_contract import PagesContract
from asyncmem.testing.device_contract.pages import Range

MIB = 1 << 20


PAGED = pytest.mark.parametrize("rig", ["virtual", "wall", "cuda"], indirect=True)


@PAGED
class TestContract(PagesContract):
    pass


class TestWithoutPages:
    @pytest.mark.parametrize("make", [Host, lambda: Simulated(page=0)], ids=["host", "simulated"])
    def test_a_device_without_pages_says_so(self, make: type[Host]) -> None:
        """Its page is 0, and its addresses come with their memory."""
        device = make()
        assert device.page == 0
        for call in (lambda: device.reserve(MIB), lambda: device.unreserve(0, MIB), lambda: device.remap([], [])):
            with pytest.raises(InvalidRequest, match=r"pages|range"):
                call()
        device.close()

    def test_a_page_is_a_power_of_two(self) -> None:
        """Any other is refused at once."""
        with pytest.raises(InvalidRequest, match="power of two"):
            Simulated(page=3 * MIB)


class TestOrder:
    """The simulated device is strict about what work may touch, and when memory may be taken away."""

    def test_unmapping_under_unfinished_work_is_an_error(self) -> None:
        """Not even when the work happens to be over: the host must have seen that."""
        device = Simulated("64 MiB")
        space, stream = Range(device), device.create_stream()
        space.map(space.at(0), space.at(1))
        device.fill(space.at(1)[0], 1, 0, stream)
        fence: Fence = stream.record()
        with pytest.raises(StreamOrderError, match="given back before"):
            device.remap([space.at(1)], [])
        fence.block()
        space.unmap(space.at(1))

    def test_bare_addresses_cannot_be_used(self) -> None:
        """Neither before memory comes nor after it went."""
        device = Simulated("64 MiB")
        space = Range(device)
        space.map(space.at(1))
        for address, nbytes in (space.at(0), space.at(2), (space.at(1)[0] + 1, space.page)):
            with pytest.raises(StreamOrderError, match="not in any segment"):
                device.fill(address, nbytes, 0, device.default_stream)
        device.remap([space.at(1)], [space.at(5)])
        with pytest.raises(StreamOrderError, match="not in any segment"):
            device.fill(*space.at(1), 0, device.default_stream)
        device.fill(*space.at(5), 0, device.default_stream)

    def test_memory_that_moved_is_for_every_stream(self) -> None:
        """Nothing is left to be ordered: the host saw all earlier work done."""
        device = Simulated("64 MiB")
        space, one, two = Range(device), device.create_stream(), device.create_stream()
        space.map(space.at(0))
        device.fill(*space.at(0), 1, one)
        one.record().block()
        device.remap([space.at(0)], [space.at(9)])
        device.fill(*space.at(9), 2, two)

    def test_memory_that_moves_takes_its_uses_along(self) -> None:
        """Work at the new address comes after that at the old one, in the same stream or behind a fence."""
        device = Simulated("64 MiB")
        space, one, two = Range(device), device.create_stream(), device.create_stream()
        space.map(space.at(0), space.at(1))
        device.fill(*space.at(0), 1, one)
        device.copy(space.at(0)[0], space.at(1)[0], 8, one)
        device.remap([], [], [(space.at(0), space.at(9)[0]), (space.at(1), space.at(8)[0])])
        for touched in (9, 8):
            with pytest.raises(StreamOrderError, match="used out of order"):
                device.fill(*space.at(touched), 2, two)
        device.fill(*space.at(9), 2, one)
        two.wait(one.record())
        device.fill(*space.at(9), 3, two)
        device.fill(*space.at(8), 3, two)

    def test_an_address_is_not_used_after_its_memory_moved(self) -> None:
        """Not even by the stream whose work is in order: the address may be unmapped before long."""
        device = Simulated("64 MiB")
        space = Range(device)
        space.map(space.at(0))
        device.fill(*space.at(0), 1, device.default_stream)
        device.remap([], [], [(space.at(0), space.at(9)[0])])
        with pytest.raises(StreamOrderError, match="before it moved"):
            device.fill(*space.at(0), 1, device.default_stream)
        with pytest.raises(InvalidRequest, match="latest address"):
            device.remap([], [], [(space.at(0), space.at(3)[0])])

    def test_both_addresses_are_unmapped_behind_the_work_there(self) -> None:
        """What was done at the first holds up the second, which shows the same memory; not the other way round."""
        device = Simulated("64 MiB")
        space, stream = Range(device), device.create_stream()
        space.map(space.at(0))
        device.fill(*space.at(0), 1, stream)
        before = stream.record()
        device.remap([], [], [(space.at(0), space.at(9)[0])])
        for page in (0, 9):
            with pytest.raises(StreamOrderError, match="given back before"):
                device.remap([space.at(page)], [])
        device.fill(*space.at(9), 1, stream)
        before.block()
        space.unmap(space.at(0))
        with pytest.raises(StreamOrderError, match="given back before"):
            device.remap([space.at(9)], [])

    def test_a_move_goes_where_nothing_is(self) -> None:
        """Not even to what the same remap unmaps, for that comes later."""
        device = Simulated("64 MiB")
        space = Range(device)
        space.map(space.at(0), space.at(1))
        free = space.at(6)[0]
        for moves in ([(space.at(0), space.at(1)[0])], [(space.at(5), free)], 2 * [(space.at(0), free)]):
            with pytest.raises(InvalidRequest, match="moves"):
                device.remap([space.at(1)], [], moves)
        space.unmap(space.at(0), space.at(1))


class TestFaults:
    @pytest.mark.parametrize("name", ["map", "set_access", "unmap", "release", "create"])
    def test_each_call_of_a_move_may_fail(self, name: str) -> None:
        """What is told is so: memory is where it was, or where it is to be, and none is lost."""
        device = Simulated("64 MiB")
        failed = 0
        while True:
            space = Range(device)
            space.map(space.at(0, 2), space.at(2, 2), space.at(4))
            moves = [(space.at(0, 2), space.at(10)[0]), (space.at(2, 2), space.at(20)[0])]
            out, wanted = [space.at(0, 2), space.at(4)], [space.at(30, 5), space.at(40, 3)]
            device.fail(name, failed + 1)
            done = device.remap(out, wanted, moves)
            if done.error is None:
                break
            failed += 1
            left = [*out[done.unmapped :], space.at(2, 2), *wanted[: done.mapped]]
            targets = [(to, nbytes) for (_, nbytes), to in moves[: done.moved]]
            current = {*left, *targets} - {span for span, _ in moves[: done.moved]}
            for span in current:
                device.fill(*span, 0, device.default_stream)
            device.default_stream.synchronize_blocking()
            if name != "release":
                assert device.reserved == sum(nbytes for _, nbytes in current)
            space.unmap(*left, *targets)
            assert device.reserved == 0
            space.end()
        assert failed == {"map": 4, "set_access": 4, "unmap": 2, "release": 1, "create": 2}[name]

    @pytest.mark.parametrize("name", ["unmap", "create", "map", "set_access", "release"])
    def test_each_call_may_fail(self, name: str) -> None:
        """What is told is so, all memory is accounted for, and the next try goes through."""
        device = Simulated("64 MiB")
        failed = 0
        while True:
            space = Range(device)
            space.map(space.at(0, 2), space.at(2, 2), space.at(4))
            out, wanted = [space.at(0, 2), space.at(2, 2), space.at(4)], [space.at(10, 2), space.at(20), space.at(22)]
            device.fail(name, failed + 1)
            done = device.remap(out, wanted)
            if done.error is None:
                break
            failed += 1
            assert isinstance(done.error, DeviceError)
            left = out[done.unmapped :] + wanted[: done.mapped]
            assert len(left) < len(out + wanted)
            for span in left:
                device.fill(*span, 0, device.default_stream)
            device.default_stream.synchronize_blocking()
            if name != "release":
                assert device.reserved == sum(nbytes for _, nbytes in left)
            space.unmap(*left)
            assert device.reserved == 0
            space.end()
        assert failed == {"unmap": 3, "create": 1, "map": 3, "set_access": 3, "release": 1}[name]

    def test_a_release_that_failed_is_made_up_for(self) -> None:
        """The memory is still the device's, and serves the next span of its size or goes back with the next remap."""
        device = Simulated("64 MiB")
        space = Range(device)
        space.map(space.at(0), space.at(1))
        device.fail("release")
        done = device.remap([space.at(0)], [])
        assert (done.unmapped, device.reserved) == (1, 2 * space.page)
        assert isinstance(done.error, DeviceError)
        space.map(space.at(0))
        assert device.reserved == 2 * space.page
