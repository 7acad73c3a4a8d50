"""The checker itself: what is order, what is not, and that its map of memory forgets no byte."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncmem.devices import StreamOrderError
from asyncmem.devices.simulated.order import Cell, OrderChecker, RangeMap

A, B, C = range(3)
BASE, SIZE = 1000, 100


@pytest.fixture
def checker() -> OrderChecker:
    checker = OrderChecker()
    for stream, name in enumerate("abc"):
        checker.add_stream(stream, name)
    checker.map(BASE, SIZE, None)
    return checker


def use(checker: OrderChecker, stream: int, at: int = 0, nbytes: int = SIZE, *, write: bool = True) -> None:
    checker.begin(stream)
    checker.touch(stream, BASE + at, nbytes, write=write)


class TestOrder:
    def test_of_one_streams_work_is_given(self, checker: OrderChecker) -> None:
        """A stream may always touch what it touched before."""
        use(checker, A)
        use(checker, A)

    def test_passes_on_from_stream_to_stream(self, checker: OrderChecker) -> None:
        """C waits for b, which waited for a: so c is behind a."""
        use(checker, A)
        checker.wait(B, checker.record(A))
        checker.wait(C, checker.record(B))
        use(checker, C)

    def test_is_not_what_a_fence_from_before_the_use_gives(self, checker: OrderChecker) -> None:
        """A stale fence orders what was before it, and no more."""
        use(checker, A, 0, 10)
        stale = checker.record(A)
        use(checker, A, 10, 10)
        checker.wait(B, stale)
        use(checker, B, 0, 10)
        with pytest.raises(StreamOrderError):
            use(checker, B, 10, 10)

    def test_of_the_waiting_stream_does_not_bind_the_other(self, checker: OrderChecker) -> None:
        """Waiting has a direction."""
        checker.wait(B, checker.record(A))
        use(checker, B)
        with pytest.raises(StreamOrderError):
            use(checker, A)

    def test_begins_with_what_the_host_saw_done(self, checker: OrderChecker) -> None:
        """All work submitted after that is behind it, on every stream."""
        use(checker, A)
        checker.seen(checker.record(A))
        use(checker, B)

    def test_is_not_needed_between_reads(self, checker: OrderChecker) -> None:
        """Two streams may read the same bytes at once, and whoever writes them next is behind both."""
        use(checker, A, write=False)
        use(checker, B, write=False)
        checker.wait(C, checker.record(A))
        with pytest.raises(StreamOrderError, match="'b'"):
            use(checker, C)
        checker.wait(C, checker.record(B))
        use(checker, C)

    def test_of_all_streams_covers_each(self, checker: OrderChecker) -> None:
        """A context-wide fence is behind everything."""
        use(checker, A, 0, 10)
        use(checker, B, 10, 10)
        checker.wait(C, checker.record_all())
        use(checker, C)


class TestRanges:
    def test_that_only_meet_do_not_conflict(self, checker: OrderChecker) -> None:
        """Neighbouring bytes are nobody's business."""
        use(checker, A, 0, 50)
        use(checker, B, 50, 50)

    @pytest.mark.parametrize(("at", "nbytes"), [(0, 41), (59, 41), (45, 1), (0, 100), (40, 20)])
    def test_that_share_a_byte_do(self, checker: OrderChecker, at: int, nbytes: int) -> None:
        """However they overlap."""
        use(checker, A, 40, 20)
        with pytest.raises(StreamOrderError) as caught:
            use(checker, B, at, nbytes)
        assert caught.value.other == "a"

    def test_of_no_bytes_touch_nothing(self, checker: OrderChecker) -> None:
        """An empty buffer is in nobody's way, wherever it lies."""
        use(checker, A)
        use(checker, B, 0, 0)
        use(checker, B, 10 * SIZE, 0)

    def test_may_cross_from_one_segment_into_its_neighbour(self, checker: OrderChecker) -> None:
        """Mapped is mapped; a gap is not."""
        checker.map(BASE + SIZE, SIZE, None)
        use(checker, A, SIZE - 1, 2)
        checker.unmap(BASE, 0)
        checker.seen(checker.record(A))
        checker.unmap(BASE, SIZE)
        with pytest.raises(StreamOrderError, match="not in any segment"):
            use(checker, A, SIZE - 1, 2)


class TestUnmapping:
    def test_needs_reads_to_be_seen_done_too(self, checker: OrderChecker) -> None:
        """Reading unmapped memory is a fault as well."""
        use(checker, A, write=False)
        with pytest.raises(StreamOrderError, match="given back"):
            checker.unmap(BASE, SIZE)

    def test_of_untouched_memory_is_fine(self, checker: OrderChecker) -> None:
        """Nothing was submitted on it."""
        checker.unmap(BASE, SIZE)


writes = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 20), st.integers(0, 9)), max_size=30)


@given(writes)
def test_the_map_agrees_with_one_entry_a_byte(history: list[tuple[int, int, int]]) -> None:
    """Cutting and replacing keeps for each byte who wrote it last, and leaves no hole."""
    ranges = RangeMap()
    ranges.add(Cell(0, 60))
    plain: list[int | None] = [None] * 60
    for start, nbytes, stamp in history:
        ranges.replace(start, start + nbytes, Cell(start, start + nbytes, write=(stamp, 0)))
        plain[start : start + nbytes] = [stamp] * nbytes
    cells = ranges.cells(0, 60)
    seen = [cell.write and cell.write[0] for cell in cells for _ in range(cell.start, cell.end)]
    assert seen == plain


@given(st.integers(0, 70), st.integers(1, 70))
def test_the_map_gives_whole_ranges_or_none(start: int, nbytes: int) -> None:
    """Cells are returned only if they cover each byte asked for, and exactly those."""
    ranges = RangeMap()
    ranges.add(Cell(10, 30))
    ranges.add(Cell(30, 50))
    cells = ranges.cells(start, start + nbytes)
    inside = start >= 10 and start + nbytes <= 50
    assert bool(cells) == inside
    if inside:
        assert (cells[0].start, cells[-1].end) == (start, start + nbytes)
