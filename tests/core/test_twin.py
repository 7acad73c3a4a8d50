"""The compiled heap and its plain twin live through the same histories and never differ."""

import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typing_extensions import override

from asyncmem.core import Heap
from tests.reference import ReferenceHeap
from tests.reference.blocks import Block, Entries
from tests.reference.index import FreeIndex
from tests.reference.place import Search

from .history import SEGMENT, SIZES, Pair, live_through_many, random_step


def live_through(seed: int, steps: int, twin: type[ReferenceHeap] | None = None) -> None:
    draw = random.Random(seed)
    pair = Pair(twin)
    pair.add_segment(SEGMENT, 0, 0)
    pair.add_segment(2 * SEGMENT, 1, 0)
    for _ in range(steps):
        random_step(pair, draw)
        pair.compare()


@pytest.mark.parametrize("seed", range(25))
def test_long_histories_are_equal_step_by_step(seed: int) -> None:
    """Whatever is asked of both heaps, blocks, levels, flags, counts and reports stay equal after every step."""
    live_through(seed, 200)


@pytest.mark.parametrize("seed", range(40))
def test_histories_that_nobody_looks_into_are_equal(seed: int) -> None:
    """What the compiled heap puts off until somebody looks changes neither what it serves nor what is seen then."""
    draw = random.Random(seed)
    pair = Pair(strategy="good_fit" if seed % 4 == 3 else "best_fit", stream_cache_bytes=1 << (18 if seed % 2 else 26))
    pair.add_segment(SEGMENT, 0, 0)
    for arena in (1, 1, 0)[: 1 + seed % 3]:
        pair.add_segment(2 * SEGMENT, arena, 0)
    for _ in range(30):
        for _ in range(draw.randrange(1, 60)):
            if draw.random() < 0.05:
                random_step(pair, draw)
            elif pair.live and draw.random() < 0.5:
                pair.free(-1 if draw.random() < 0.7 else draw.randrange(len(pair.live)), [])
            else:
                pair.take(draw.choice((300_000, 900_000, draw.randrange(1, SEGMENT))), 0, (0, -1))
        pair.compare()


def come_and_go(pair: Pair, draw: random.Random, stream: int) -> None:
    """Take a block and mostly free it, with something else before, between or after it now and then."""
    if draw.random() < 0.03:
        random_step(pair, draw)
    pair.take((1 << 20) + draw.choice((0, 512, draw.randrange(3 * SEGMENT))), stream, (0, -1))
    assert pair.fast.last_level() == pair.twin.last_level()
    assert pair.fast.touched() == pair.twin.touched()
    if pair.live and draw.random() < 0.05:
        pair.hand_over(-1, draw.randrange(pair.streams))
    if pair.live and draw.random() < 0.95:
        users = draw.sample(range(pair.streams), draw.randrange(3)) if draw.random() < 0.15 else ()
        pair.free(-1, [(user, pair.fast.open_epoch(user)) for user in users])
    if draw.random() < 0.1:
        pair.finish(stream)
    if draw.random() < 0.05:
        pair.take((1 << 20) + draw.randrange(SEGMENT), draw.randrange(pair.streams), (0, -1))


@pytest.mark.parametrize("seed", range(60))
def test_blocks_that_come_and_go_in_turn_are_equal(seed: int) -> None:
    """A block that rests before its hole until the next request serves as if it had joined, whatever comes between."""
    draw = random.Random(seed)
    pair = Pair(strategy="good_fit" if seed % 4 == 3 else "best_fit")
    pair.add_stream()
    pair.add_stream()
    for _ in range(1 + seed % 3):
        pair.add_segment(draw.choice((2, 3, 4)) * SEGMENT, 1, 0)
    for _ in range(60):
        stream = draw.randrange(pair.streams) if draw.random() < 0.3 else 0
        if draw.random() < 0.1:
            pair.finish(stream)
            pair.both(lambda heap: heap.merge())
        for _ in range(draw.randrange(1, 12)):
            come_and_go(pair, draw, stream)
        if len(pair.live) > draw.randrange(3):
            pair.free_many(pair.live[-3:])
        pair.compare()


@settings(max_examples=60)
@given(st.lists(st.tuples(st.sampled_from(SIZES), st.integers(0, 2), st.integers(0, 9)), max_size=60))
def test_takes_and_frees_on_three_streams_are_equal(steps: list[tuple[int, int, int]]) -> None:
    """Hypothesis finds no order of takes, frees and finished epochs in which the two differ."""
    pair = Pair()
    pair.add_segment(SEGMENT, 0, 0)
    pair.add_segment(2 * SEGMENT, 1, 0)
    pair.add_stream()
    pair.add_stream()
    for nbytes, stream, choice in steps:
        if choice < 5:
            pair.take(nbytes, stream, (0, -1), anywhere=choice == 4)
        elif choice < 8 and pair.live:
            pair.free(nbytes + choice, [(stream, 1)] if choice == 7 else [])
        elif choice == 8:
            pair.finish(stream)
        else:
            pair.take_foreign(nbytes, stream, (0, -1), late=True, keep=True)
        pair.compare()


@pytest.mark.parametrize("seed", range(12))
def test_histories_with_few_and_with_many_holes_are_equal(seed: int) -> None:
    """What the index knows of a few blocks and of many, and what becomes of it in between, serves the same."""
    draw = random.Random(seed)
    pair = Pair(strategy="good_fit" if seed % 4 == 3 else "best_fit")
    pair.add_segment(96 * SEGMENT, 1, 0)
    for live in (320, 160, 300, 12, 250, 130, 0):
        while len(pair.live) != live:
            if (draw.random() < 0.9 and len(pair.live) < live) or not pair.live:
                pair.take((1 << 20) + draw.choice((0, draw.randrange(1 << 15))), 0, (0, -1))
            else:
                pair.free(draw.randrange(len(pair.live)), [])
        pair.compare()
        for _ in range(20):
            pair.take((1 << 20) + draw.randrange(1 << 20), 0, (0, -1))
            pair.free(-1)
        pair.compare()


def test_another_stream_waits_for_the_last_use_of_a_block_at_rest() -> None:
    """Though its hole itself is done with, as what was freed earlier is."""
    pair = Pair()
    pair.add_stream()
    pair.add_segment(2 * SEGMENT, 1, 0)
    for nbytes in (2 << 20, 3 << 20, 4 << 20, 3 << 20):
        pair.take(nbytes, 0, (0, -1))
        pair.free(-1)
    pair.finish(0)
    pair.take(2 << 20, 0, (0, -1))
    pair.free(-1)
    assert not pair.live
    pair.take(1 << 20, 1, (0, -1))
    assert not pair.live
    pair.compare()


def test_more_blocks_come_and_go_in_turn_than_rest_at_once() -> None:
    """Each of a dozen holes has its sizes; two are alike, of which the lower one serves."""
    draw = random.Random(0)
    pair = Pair()
    sizes = [(2 << 20) + number * (1 << 18) for number in range(12)]
    for nbytes in [*sizes, sizes[3]]:
        pair.add_segment(nbytes, 1, 0)
    for number in range(800):
        pair.take(draw.choice(sizes) - 512 * draw.randrange(1, 400), 0, (0, -1))
        assert pair.fast.touched() == pair.twin.touched()
        pair.free(-1)
        if number % 100 == 99:
            pair.compare()


@pytest.mark.parametrize("period", [100, 110, 10_000])
def test_large_blocks_that_are_flushed_before_they_serve_are_kept_less_readily(period: int) -> None:
    """Both keep and give back the same, for as long as one may be doubted, and begin anew once a block has served."""
    pair = Pair(shared_cache_blocks=0)
    pair.add_segment(4 * SEGMENT, 1, 0)
    flushes = []
    for number in range(1200):
        pair.take(1 << 20, 0, (0, -1))
        pair.free(-1)
        if number % period < period - 32:
            flushes.append(pair.both(lambda heap: heap.flush(0)) > 0)
        assert pair.fast.counts().cached == pair.twin.counts().cached
    pair.compare()
    assert sum(flushes[:200]) > 60
    assert (sum(flushes[-200:]) > 5) == (period < 1000)


LOOKS: dict[str, Callable[[Heap | ReferenceHeap], object]] = {
    "blocks": lambda heap: heap.blocks(),
    "counts": lambda heap: heap.counts(),
    "segments": lambda heap: heap.segments(),
    "largest": lambda heap: heap.largest(),
    "pending": lambda heap: heap.pending(),
    "empty_segments": lambda heap: heap.empty_segments(),
    "merge": lambda heap: (
        heap.mark_done(0, heap.close_epoch(0)),
        heap.merge(),
        heap.take(1 << 20, 0) > 0,
        heap.blocks(),
    ),
    "has_addresses": lambda heap: heap.has_addresses(2 * SEGMENT, 0),
    "check": lambda heap: heap.check(),
    "remove_segment": lambda heap: heap.remove_segment(1),
    "add_segment": lambda heap: (heap.add_segment(1 << 40, 1 << 20, 1, 0), heap.take(1 << 20, 0) > 0, heap.blocks()),
    "take_foreign": lambda heap: (heap.take_foreign(2 * SEGMENT, 0) is None, heap.blocks()),
}


@pytest.mark.parametrize("look", LOOKS.values(), ids=LOOKS)
def test_whoever_looks_finds_no_block_at_rest(look: Callable[[Heap | ReferenceHeap], object]) -> None:
    """Asked right after a block was laid to rest, everything answers as if it had joined its hole."""
    pair = Pair()
    pair.add_segment(SEGMENT, 0, 0)
    pair.add_segment(2 * SEGMENT, 1, 0)
    for nbytes in (3 << 20, 2 << 20, 4 << 20):
        pair.take(nbytes, 0, (0, -1))
        pair.free(-1)
    pair.both(look)


def test_a_block_at_rest_in_a_lease_joins_before_an_address_is_asked_for() -> None:
    """What `take_at` asks for may lie where a block rests that was freed just now."""
    pair = Pair()
    pair.add_segment(SEGMENT, 1, 0)
    pair.take(SEGMENT, 0, (0, -1))
    address = pair.fast.info(pair.live[0][0]).address
    pair.open_lease(0)
    account, arena = pair.inner[pair.leases[0]], pair.leases[0]
    for nbytes in (4096, 8192, 4096):
        pair.take(nbytes, 0, (account, arena))
        pair.free(-1)
    assert pair.fast.take_at(address, SEGMENT, 0, account, arena, True) is not None
    pair.fast.check()


class DropsDependencyOnMerge(ReferenceHeap):
    @override
    def absorb(self, low: Block, high: Block) -> None:
        high.entries = {}
        super().absorb(low, high)


class IgnoresOtherStreams(ReferenceHeap):
    @override
    def eligible(self, block: Block, stream: int, bound: str) -> bool:
        return True


class ForgetsOtherUsers(ReferenceHeap):
    @override
    def give_back(self, block: Block, extra: Entries) -> None:
        super().give_back(block, {})


class TakesTheLargest(ReferenceHeap):
    @override
    def best_of_all(self, index: FreeIndex, search: Search) -> Block | None:
        return max(index.blocks, key=lambda block: block.granules, default=None)


BROKEN = [DropsDependencyOnMerge, IgnoresOtherStreams, ForgetsOtherUsers, TakesTheLargest]


@pytest.mark.parametrize("broken", BROKEN, ids=lambda kind: kind.__name__)
def test_a_broken_rule_is_seen(broken: type[ReferenceHeap]) -> None:
    """A twin with one rule broken differs within a few histories, so the comparison does hold the rules."""
    with pytest.raises(AssertionError):
        live_through_many(live_through, broken)
