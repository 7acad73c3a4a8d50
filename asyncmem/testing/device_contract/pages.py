"""For devices with pages: what lies behind reserved addresses."""

from collections.abc import Iterator

import pytest

from asyncmem.devices import Device
from asyncmem.errors import InvalidRequest, OutOfMemoryError
from asyncmem.testing.device_contract.contract import Rigged, read


class Range:
    """A reserved range of a device, by pages."""

    def __init__(self, device: Device, pages: int = 64) -> None:
        self.device, self.page = device, device.page
        self.nbytes = pages * device.page
        self.address = device.reserve(self.nbytes)

    def at(self, page: int, pages: int = 1) -> tuple[int, int]:
        return self.address + page * self.page, pages * self.page

    def map(self, *spans: tuple[int, int]) -> None:
        done = self.device.remap([], spans)
        assert (done.mapped, done.error) == (len(spans), None)

    def unmap(self, *spans: tuple[int, int]) -> None:
        done = self.device.remap(spans, [])
        assert (done.unmapped, done.error) == (len(spans), None)

    def end(self) -> None:
        self.device.unreserve(self.address, self.nbytes)


class PagesContract(Rigged):
    """Memory is mapped under reserved addresses and moves there."""

    @pytest.fixture
    def space(self, device: Device) -> Iterator[Range]:
        """A reserved range, in which nothing is left mapped."""
        made = Range(device)
        yield made
        made.end()

    def test_addresses_are_whole_pages_and_hold_no_memory(self, device: Device) -> None:
        """A range may be larger than the device, because it is nothing but addresses."""
        free = device.memory().free
        large = 4 * device.capacity // device.page * device.page
        address = device.reserve(large)
        assert address % device.page == 0
        assert device.memory().free == free
        device.unreserve(address, large)

    def test_ranges_do_not_overlap(self, device: Device) -> None:
        """Two ranges have no byte in common, and one that went back may come again."""
        first, second = Range(device), Range(device)
        low, high = sorted((first, second), key=lambda one: one.address)
        assert low.address + low.nbytes <= high.address
        first.end()
        second.end()

    def test_mapped_memory_is_used_as_any_other(self, device: Device, space: Range) -> None:
        """Also across the border of two pieces that were mapped one behind the other."""
        space.map(space.at(3, 2), space.at(5))
        border = space.at(5)[0]
        device.fill(border - 8, 16, 7, device.default_stream)
        assert read(device, border - 8, 16) == b"\7" * 16
        space.unmap(space.at(3, 2), space.at(5))

    def test_memory_moves_without_more_of_it(self, device: Device, space: Range) -> None:
        """What is unmapped serves a span of its size; meanwhile and afterwards there is as much memory as before.

        Others may use the same card: what moving takes is taken each time. No size comes twice, so that nothing which
        might be kept of one time would do for another.
        """
        taken = []
        for small, large in ((1, 4), (2, 5), (3, 6)):
            space.map(space.at(0, large), space.at(8, small))
            free = device.memory().free
            done = device.remap([space.at(0, large), space.at(8, small)], [space.at(20, small), space.at(30, large)])
            taken.append(free - device.memory().free)
            assert (done.unmapped, done.mapped, done.error) == (2, 2, None)
            device.fill(*space.at(30, large), 5, device.default_stream)
            assert read(device, space.at(29 + large)[0]) == b"\5"
            space.unmap(space.at(20, small), space.at(30, large))
        assert 0 in taken

    def test_a_move_shows_memory_at_a_second_address(self, device: Device, space: Range) -> None:
        """What was written before is read there; it takes no more memory, and stays without the first."""
        space.map(space.at(0, 2), space.at(2), space.at(6))
        free, stream = device.memory().free, device.default_stream
        for page in range(3):
            device.fill(*space.at(page), page + 1, stream)
        done = device.remap([], [], [(space.at(0, 2), space.at(20)[0]), (space.at(2), space.at(40)[0])])
        assert (done.moved, done.unmapped, done.mapped, done.error) == (2, 0, 0, None)
        assert read(device, space.at(20)[0]) + read(device, space.at(22)[0] - 1) == b"\1\2"
        device.fill(space.at(40)[0] + 8, 8, 9, stream)
        assert read(device, space.at(40)[0], 16) == b"\3" * 8 + b"\t" * 8
        space.unmap(space.at(0, 2), space.at(2))
        assert device.memory().free == free
        assert read(device, space.at(21)[0]) + read(device, space.at(41)[0] - 1) == b"\2\3"
        space.unmap(space.at(20, 2), space.at(40), space.at(6))
        assert device.memory().free == free + 4 * space.page

    def test_memory_goes_back_with_its_last_address(self, device: Device, space: Range) -> None:
        """Whichever is unmapped first, and however often it has moved."""
        free = device.memory().free
        space.map(space.at(0))
        for page in range(1, 5):
            assert device.remap([], [], [(space.at(page - 1), space.at(page)[0])]).error is None
        for page in (4, 1, 0, 3):
            assert free - device.memory().free == space.page
            space.unmap(space.at(page))
        assert free - device.memory().free == space.page
        space.unmap(space.at(2))
        assert device.memory().free == free

    def test_a_remap_moves_then_unmaps_then_maps(self, device: Device, space: Range) -> None:
        """So memory may move and its first address be unmapped at once, and what went back is there for what comes."""
        space.map(space.at(0, 2), space.at(8, 3))
        free = device.memory().free
        device.fill(space.at(0)[0], 1, 6, device.default_stream)
        device.default_stream.synchronize_blocking()
        out = [space.at(0, 2), space.at(8, 3)]
        done = device.remap(out, [space.at(8, 1)], [(space.at(0, 2), space.at(30)[0])])
        assert (done.moved, done.unmapped, done.mapped, done.error) == (1, 2, 1, None)
        assert device.memory().free == free + 2 * space.page
        assert read(device, space.at(30)[0]) == b"\6"
        space.unmap(space.at(8), space.at(30, 2))

    def test_what_serves_no_span_goes_back(self, device: Device, space: Range) -> None:
        """Memory of another size is of no use to a span: it is released, and new memory comes."""
        free = device.memory().free
        space.map(space.at(0, 4))
        done = device.remap([space.at(0, 4)], [space.at(0, 2)])
        assert (done.unmapped, done.mapped, done.error) == (1, 1, None)
        assert free - device.memory().free == 2 * space.page
        space.unmap(space.at(0, 2))
        assert device.memory().free == free

    def test_too_much_leaves_what_was_there_before(self, device: Device) -> None:
        """The spans before the one that there is no memory for stay, and are reported."""
        pages = device.capacity // device.page  # and not what is free now, as others may free more
        space = Range(device, 2 * pages)
        done = device.remap([], [space.at(0, 2), space.at(4, pages)])
        assert (done.unmapped, done.mapped) == (0, 1)
        assert isinstance(done.error, OutOfMemoryError)
        device.fill(*space.at(0, 2), 3, device.default_stream)
        assert read(device, space.at(1)[0]) == b"\3"
        space.unmap(space.at(0, 2))
        space.end()

    @pytest.mark.parametrize("span", [(64, 1), (63, 2), (-1, 1), (3, 0)])
    def test_refuses_to_map_outside_of_a_range(self, device: Device, space: Range, span: tuple[int, int]) -> None:
        """A span is whole pages of one range."""
        with pytest.raises(InvalidRequest, match="reserved range"):
            device.remap([], [space.at(*span)])

    @pytest.mark.parametrize("page", [64, 63, -1])
    def test_refuses_to_move_out_of_a_range(self, device: Device, space: Range, page: int) -> None:
        """Both addresses are in ranges of the device."""
        space.map(space.at(5, 2))
        with pytest.raises(InvalidRequest, match="reserved range"):
            device.remap([], [], [(space.at(5, 2), space.at(page)[0])])
        space.unmap(space.at(5, 2))

    def test_refuses_a_range_that_is_not_whole_pages_or_not_reserved(self, device: Device) -> None:
        """Nothing is done then."""
        with pytest.raises(InvalidRequest, match="whole pages"):
            device.reserve(device.page + 1)
        space = Range(device)
        with pytest.raises(InvalidRequest, match="range"):
            device.unreserve(space.address, space.page)
        space.end()
        with pytest.raises(InvalidRequest, match="range"):
            space.end()

    def test_a_range_with_memory_does_not_go_back(self, device: Device, space: Range) -> None:
        """It can still be used then, and goes back once it is bare."""
        space.map(space.at(1))
        with pytest.raises(InvalidRequest, match="nothing is mapped"):
            space.end()
        device.fill(space.at(1)[0], 1, 9, device.default_stream)
        assert read(device, space.at(1)[0]) == b"\t"
        space.unmap(space.at(1))

    def test_what_is_mapped_outlives_the_closing_of_the_device(self, device: Device, space: Range) -> None:
        """As segments do: it can be unmapped afterwards, and nothing else can be mapped by a driver that is left."""
        space.map(space.at(1))
        device.close()
        space.unmap(space.at(1))
