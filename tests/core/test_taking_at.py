"""Taking a lease's memory by its addresses: just these bytes, ordered behind all who have used any of them."""

import random

import pytest
from typing_extensions import override

from asyncmem.core import Heap
from tests.reference import ReferenceHeap
from tests.reference.blocks import Block

from .history import SEGMENT, Pair, live_through_many

RANGE = 1 << 16


def leased(pair: Pair) -> None:
    """Have the two heaps hold one lease of `RANGE` bytes, and know three streams."""
    pair.add_segment(SEGMENT, 0, 0)
    pair.add_stream()
    pair.add_stream()
    pair.take(RANGE, 0, (0, 0))
    pair.open_lease(0)


def live_through(seed: int, steps: int, twin: type[ReferenceHeap] | None = None) -> int:
    """Take by address, take by size, free and finish at random inside of a lease; return how many takes were joined."""
    draw, pair = random.Random(seed), Pair(twin)
    leased(pair)
    (arena,) = pair.leases
    for _ in range(steps):
        choice, stream = draw.random(), draw.randrange(3)
        if choice < 0.5:
            pair.take_at(512 * draw.randrange(1, 24), stream, 0, draw.randrange(RANGE // 512), late=draw.random() < 0.6)
        elif choice < 0.55:
            pair.take(512 * draw.randrange(1, 24), stream, (pair.inner[arena], arena))
        elif choice < 0.95 and pair.live:
            pair.free(draw.randrange(len(pair.live)), [(draw.randrange(3), 1)] if draw.random() < 0.2 else [])
        elif choice < 0.97:
            pair.finish(stream)
        else:
            pair.both(lambda heap, stream=stream: heap.close_epoch(stream))
        pair.compare()
    merges = pair.fast.counts().merges
    pair.close_lease(0)
    pair.compare()
    return merges


@pytest.mark.parametrize("seed", range(6))
def test_histories_inside_of_a_lease_are_equal(seed: int) -> None:
    """The compiled heap and its twin serve the same bytes behind the same entries, and agree in all else."""
    assert live_through(seed, 300) > 5


class IgnoresOtherStreams(ReferenceHeap):
    @override
    def eligible(self, block: Block, stream: int, bound: str) -> bool:
        return True


class OrdersBehindTheFirstOnly(ReferenceHeap):
    @override
    def absorb(self, low: Block, high: Block) -> None:
        high.entries = {}
        super().absorb(low, high)


@pytest.mark.parametrize("broken", [IgnoresOtherStreams, OrdersBehindTheFirstOnly], ids=lambda kind: kind.__name__)
def test_a_broken_rule_is_seen(broken: type[ReferenceHeap]) -> None:
    """A twin with one rule broken differs, so the comparison does hold the rules."""
    with pytest.raises(AssertionError):
        live_through_many(live_through, broken)


def test_what_is_named_is_what_is_had() -> None:
    """The block lies where it was asked for, whatever lies before and behind it stays free, and comes back joined."""
    heap = Heap()
    heap.add_segment(SEGMENT, SEGMENT, 0, 0)
    arena = heap.open_lease(heap.take(RANGE, 0))
    account = heap.add_account(-1)
    found = heap.take_at(SEGMENT + 4096, 1000, 0, account, arena)
    assert found is not None
    assert (heap.info(found[0]).address, heap.info(found[0]).nbytes) == (SEGMENT + 4096, 1024)
    assert heap.take_at(SEGMENT + 4096, 512, 0, account, arena) is None, "it is in use"
    assert heap.take_at(SEGMENT + 3584, 1024, 0, account, arena) is None, "so is a part of this"
    assert heap.take_at(SEGMENT + 3584, 512, 0, account, arena) is not None
    heap.free(found[0])
    heap.check()


def test_two_streams_are_waited_for_at_once() -> None:
    """Bytes that two streams have used, each a part, owe both; without late fences they are not had before."""
    heap = Heap()
    heap.add_segment(SEGMENT, SEGMENT, 0, 0)
    a, b, taker = heap.add_stream(), heap.add_stream(), heap.add_stream()
    arena = heap.open_lease(heap.take(RANGE, 0))
    account = heap.add_account(-1)
    for index, stream in enumerate((a, b)):
        block = heap.take_at(SEGMENT + index * 512, 512, stream, account, arena, late=True)
        assert block is not None
        heap.free(block[0])
    assert heap.take_at(SEGMENT, 1024, taker, account, arena) is None, "no fence is recorded yet"
    found = heap.take_at(SEGMENT, 1024, taker, account, arena, late=True)
    assert found is not None
    assert {stream for stream, _ in found[1]} == {a, b}
    heap.check()


@pytest.mark.parametrize(("offset", "nbytes"), [(-512, 512), (RANGE, 512), (100, 512), (RANGE - 512, 1024)])
def test_addresses_that_are_not_the_lease_s_are_refused(offset: int, nbytes: int) -> None:
    """An address outside of the lease, in the middle of a granule, or too near to its end is a mistake."""
    heap = Heap()
    heap.add_segment(SEGMENT, SEGMENT, 0, 0)
    heap.take(512, 0)
    arena = heap.open_lease(heap.take(RANGE, 0))
    account = heap.add_account(-1)
    start = next(block.address for block in heap.blocks() if block.arena == arena)
    with pytest.raises(ValueError, match=r"granule|lease"):
        heap.take_at(start + offset, nbytes, 0, account, arena)
    heap.check()


def test_only_a_lease_is_taken_by_its_addresses() -> None:
    """Memory that everybody shares is placed by the heap."""
    heap = Heap()
    heap.add_segment(SEGMENT, SEGMENT, 0, 0)
    with pytest.raises(ValueError, match="lease"):
        heap.take_at(SEGMENT, 512, 0, 0, 0)
