"""What the compiled heap promises about memory, streams and arguments."""

import itertools
import random
import subprocess
import sys

import pytest

from asyncmem.core import MAX_SIZE, Heap
from tests.reference import ReferenceHeap
from tests.reference.cache import WAYS, Cache

BASE = 1 << 30
SPAN = 1 << 26


@pytest.fixture
def heap() -> Heap:
    heap = Heap()
    heap.add_segment(BASE, SPAN, 0, 0)
    heap.add_segment(BASE + 2 * SPAN, SPAN, 1, 0)
    return heap


def finish(heap: Heap, stream: int) -> None:
    heap.mark_done(stream, heap.close_epoch(stream))


def test_live_blocks_never_overlap_and_are_aligned(heap: Heap) -> None:
    """Blocks handed out at one time share no byte, start at whole granules and hold what was asked."""
    draw = random.Random(1)
    live: dict[int, int] = {}
    for _ in range(3000):
        if live and draw.random() < 0.45:
            block = draw.choice(list(live))
            heap.free(block)
            del live[block]
        elif block := heap.take(size := draw.choice((1, 512, 5000, 70_000, 1 << 20)), 0):
            live[block] = size
    ranges = sorted((heap.info(block).address, heap.info(block).nbytes) for block in live)
    assert all(a + size <= b for (a, size), (b, _) in itertools.pairwise(ranges))
    assert all(address % 512 == 0 for address, _ in ranges)
    assert all(heap.info(block).nbytes >= asked for block, asked in live.items())
    heap.check()


def test_everything_comes_together_after_flush_and_merge(heap: Heap) -> None:
    """When all is freed, flush() and merge() leave one free block a segment, and the segments can be removed."""
    heap.add_stream()
    blocks = [heap.take(size, stream) for size in (512, 4096, 4096, 3 << 20) for stream in (0, 0, 0)]
    for block in blocks:
        heap.free(block, [(1, 1)])
    heap.flush()
    heap.merge()
    assert [nbytes for _, _, nbytes, _ in heap.empty_segments()] == [SPAN, SPAN]
    assert heap.remove_segment(0) == ((0, 1), (1, 1))
    assert heap.reserved() == SPAN
    heap.check()


@pytest.mark.parametrize("size", [0, -1, MAX_SIZE + 1, 2**63, 2**64, 2**70])
def test_absurd_sizes_are_refused(heap: Heap, size: int) -> None:
    """Sizes that no block can have raise ValueError and change nothing."""
    before = heap.counts()
    with pytest.raises(ValueError, match="nbytes"):
        heap.take(size, 0)
    with pytest.raises(ValueError, match="nbytes"):
        heap.take_many([512, size], 0)
    assert heap.counts() == before


@pytest.mark.parametrize("size", [1.5, "512", None, 512.0])
def test_sizes_that_are_no_ints_are_refused(heap: Heap, size: object) -> None:
    """A float is not cut down to an int: TypeError."""
    with pytest.raises(TypeError, match="nbytes must be an int"):
        heap.take(size, 0)  # type: ignore[arg-type]  # what is tested


def test_the_largest_size_there_is_simply_misses(heap: Heap) -> None:
    """A size at the bound is no error, only more than there is."""
    assert heap.take(MAX_SIZE, 0) == 0
    assert heap.last_reason() == 1


def test_freeing_twice_is_refused_and_changes_nothing(heap: Heap) -> None:
    """A block that is not live is named as such, in one free or in many."""
    block, other = heap.take(4096, 0), heap.take(4096, 0)
    heap.free(block)
    with pytest.raises(ValueError, match="not a live block"):
        heap.free(block)
    for named in ([other, block], [other, other]):
        with pytest.raises(ValueError, match="not a live block"):
            heap.free_many(named)
    heap.check()
    heap.free(other)
    assert heap.live() == 0


def test_a_stream_gets_its_own_block_back_at_once(heap: Heap) -> None:
    """A size asked for again and again is served by the stream's cache, newest first."""
    heap.free(heap.take(4096, 0))
    block = heap.take(4096, 0)
    address = heap.info(block).address
    heap.free(block)
    block = heap.take(4096, 0)
    assert (heap.info(block).address, heap.last_level()) == (address, 1)


@pytest.mark.parametrize(("size", "often"), [(4096, 2), (2 << 20, 3)])
def test_a_size_is_cached_once_it_was_asked_for_often_enough(heap: Heap, size: int, often: int) -> None:
    """A small one twice, a large one three times in a row: two requests of random sizes may be alike by chance."""
    cached = []
    for _ in range(often):
        heap.free(heap.take(size, 0))
        cached.append(heap.counts().cached)
    assert cached == [0] * (often - 1) + [size]


@pytest.mark.parametrize(("others", "kept"), [(511, True), (512, False)])
def test_a_large_size_is_cached_only_where_it_is_asked_for_often(heap: Heap, others: int, kept: bool) -> None:
    """What is kept of a size that comes once in hundreds of requests would only divide the hole of the others."""
    size, table = 2 << 20, Cache(8)
    row = table.hash(size // 512) // WAYS
    elsewhere = [granules for granules in range(1000, 2000) if table.hash(granules) // WAYS != row]
    for nbytes in (size, size, *(512 * granules for granules in elsewhere[:others]), size):
        heap.free(heap.take(nbytes, 0))
    assert heap.counts().cached == size * kept


def test_another_stream_gets_a_block_only_when_its_streams_are_done() -> None:
    """take() gives stream B what A freed only once A's epoch is done; until then take_foreign() names the debt."""
    heap = Heap()
    heap.add_segment(BASE, 4096, 0, 0)
    b = heap.add_stream()
    heap.free(heap.take(4096, 0))
    assert heap.take(4096, b) == 0
    assert heap.take_foreign(4096, b) is None
    epoch = heap.close_epoch(0)
    heap.publish(0, epoch)
    found = heap.take_foreign(4096, b)
    assert found is not None
    assert found[1] == ((0, epoch),)
    heap.put_back(*found)
    assert heap.take(4096, b) == 0
    heap.mark_done(0, epoch)
    assert heap.take(4096, b) != 0


def test_unrecorded_entries_are_given_out_only_when_late_is_allowed() -> None:
    """A fence recorded late may cover later work, so such blocks come last and on request."""
    heap = Heap()
    heap.add_segment(BASE, 8192, 0, 0)
    b = heap.add_stream()
    first = heap.take(4096, 0)
    second = heap.take(4096, 0)
    heap.free(first)
    heap.publish(0, heap.close_epoch(0))
    heap.free(second, [(b, 1)])
    heap.flush()
    found = heap.take_foreign(4096, b, late=True)
    assert found is not None
    assert found[1] == ((0, 1),)
    late = heap.take_foreign(4096, b, late=True)
    assert late is not None
    assert late[1] == ((0, 2),)


def test_a_failed_take_many_leaves_no_trace(heap: Heap) -> None:
    """A batch that does not fit gives every block back with the entries it had."""
    finish(heap, 0)
    blocks = heap.blocks()
    assert heap.take_many([4096, SPAN // 2, SPAN, 1 << 20], 0) == []
    heap.merge()
    assert [(b.address, b.nbytes, b.state) for b in heap.blocks()] == [(b.address, b.nbytes, "free") for b in blocks]
    assert heap.counts().allocations == 0


def test_a_batch_lies_side_by_side(heap: Heap) -> None:
    """Equal sizes of one batch are neighbours, whatever order they were asked in."""
    sizes = [4096, 65_536, 4096, 65_536, 4096]
    blocks = heap.take_many(sizes, 0)
    assert [heap.info(block).nbytes for block in blocks] == sizes
    for size in set(sizes):
        addresses = sorted(heap.info(b).address for b, s in zip(blocks, sizes, strict=True) if s == size)
        assert addresses == list(range(addresses[0], addresses[0] + size * len(addresses), size))


def test_an_account_and_those_above_it_bound_what_is_live(heap: Heap) -> None:
    """A take over any limit on the way up is refused for that reason; a free makes room again."""
    parent = heap.add_account(0, 8192)
    child = heap.add_account(parent)
    block = heap.take(8192, 0, child)
    assert heap.take(1, 0, child) == 0
    assert heap.last_reason() == 2
    assert heap.account(parent).live == 8192
    with pytest.raises(ValueError, match="live bytes"):
        heap.remove_account(child)
    heap.free(block)
    assert heap.take(1, 0, child) != 0


def test_a_lease_is_an_arena_of_its_own_until_closed(heap: Heap) -> None:
    """Inner blocks lie inside the leased one; closing gives the rest back and leaves them valid, on its account."""
    budget = heap.add_account(0)
    outer = heap.take(1 << 20, 0, budget)
    start = heap.info(outer).address
    arena, inner_account = heap.open_lease(outer), heap.add_account(-1)
    inner = heap.take(5000, 0, inner_account, arena)
    assert start <= heap.info(inner).address < start + (1 << 20)
    assert heap.live() == 1 << 20
    with pytest.raises(ValueError, match="not a live block"):
        heap.free(outer)
    heap.close_lease(arena)
    heap.remove_account(inner_account)
    assert heap.live() == heap.account(budget).live == 5120
    heap.free(inner)
    heap.check()
    assert heap.live() == 0


@pytest.mark.parametrize("kind", [Heap, ReferenceHeap])
def test_a_free_inside_a_lease_is_told_to_who_waits_there_and_to_nobody_else(kind: type[Heap | ReferenceHeap]) -> None:
    """A block of a lease raises the flag when its account's gate is closed, whichever way it is freed."""
    heap = kind()
    heap.add_segment(BASE, SPAN, 1, 0)
    heap.add_stream()
    inner = heap.add_account(-1)
    arena = heap.open_lease(heap.take(1 << 20, 0))
    below = heap.add_account(inner)

    def frees() -> list[int]:
        one, two, three, four, range_ = (heap.take(4096, 0, below, arena) for _ in range(5))
        nested = heap.open_lease(range_)
        return [heap.free(one), heap.free(two, [(1, 1)]), heap.free_many([three, four]), heap.close_lease(nested)]

    heap.set_gate(0, True)
    assert frees() == [0, 0, 0, 0]  # what waits for the pool's memory has none of it
    heap.set_gate(0, False)
    heap.set_gate(inner, True)
    assert frees() == [1, 1, 1, 1]
    heap.check()


def test_crossing_a_mark_is_told_once(heap: Heap) -> None:
    """A mark raises its flag at the crossing and stays silent until it is set again."""
    heap.set_marks(live_low=512, live_high=8192)
    blocks = []
    flags = []
    for _ in range(4):
        blocks.append(heap.take(4096, 0))
        flags.append(heap.last_flags())
    assert flags == [0, 0, 2, 0]
    assert [heap.free(block) for block in blocks] == [0, 0, 0, 2]


def test_the_fence_of_an_open_epoch_is_refused(heap: Heap) -> None:
    """A fence recorded before the epoch was closed would not cover frees that still join it."""
    with pytest.raises(ValueError, match="still open"):
        heap.publish(0, heap.open_epoch(0))


def test_many_blocks_have_room() -> None:
    """The table of blocks grows, and those that there are stay what they are."""
    heap = Heap()
    heap.add_segment(1 << 40, 1 << 30, 0, 0)
    live = [heap.take(512, 0) for _ in range(150_000)]
    assert [heap.info(block).address for block in live] == [(1 << 40) + 512 * i for i in range(150_000)]
    heap.check()


@pytest.mark.skipif(sys.platform != "linux", reason="counts addresses as Linux does")
def test_a_heap_needs_few_addresses() -> None:
    """Where a limit on addresses leaves no room for the whole table, a smaller one does."""
    script = """
import resource
from asyncmem.core import Heap
used = 4096 * int(open("/proc/self/statm").read().split()[0])
resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 28), resource.RLIM_INFINITY))
heap = Heap()
heap.add_segment(1 << 40, 1 << 22, 0, 0)
assert heap.take(512, 0)
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


@pytest.mark.parametrize("strategy", ["best_fit", "good_fit"])
def test_nodes_examined_do_not_grow_with_the_number_of_blocks(strategy: str) -> None:
    """However many blocks there are, a take looks at no more than two windows of candidates."""
    heap = Heap(strategy=strategy)
    heap.add_segment(1 << 40, 1 << 38, 0, 0)
    heap.add_segment(1 << 45, 1 << 42, 1, 0)
    draw = random.Random(2)
    live = [heap.take(draw.randrange(512, 1 << 22), 0) for _ in range(20_000)]
    for _ in range(20_000):
        slot = draw.randrange(len(live))
        heap.free(live[slot])
        live[slot] = heap.take(draw.randrange(512, 1 << 22), 0)
    assert heap.counts().touched <= 65
    heap.check()
