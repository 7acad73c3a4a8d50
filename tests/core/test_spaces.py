"""What spaces promise: memory comes and goes below free blocks, the compiled heap and its twin alike."""

import random
from collections.abc import Callable

import pytest
from typing_extensions import override

from asyncmem.core import MAX_SIZE, REASON_MEMORY, REASON_PAGES, Heap
from asyncmem.core.report import Plan
from tests.reference import ReferenceHeap
from tests.reference.blocks import Block, Entries
from tests.reference.place import Search
from tests.reference.spaces import Handle, Space

from .history import live_through_many
from .paged import LOTS, PagedPair, paged_step

PAGE = 1 << 21
BASE = 1 << 40
PAGES = 64


@pytest.fixture
def heap() -> Heap:
    """A heap with two streams and one space, in the arena of large blocks."""
    heap = Heap()
    heap.add_space(BASE, PAGES * PAGE, 1, PAGE)
    heap.add_stream()
    return heap


def planned(heap: Heap, nbytes: int, stream: int = 0, room: int = LOTS) -> Plan:
    plan = heap.plan(nbytes, stream, room=room)
    assert isinstance(plan, Plan)
    return plan


def carry_out(heap: Heap, plan: Plan) -> None:
    for move in plan.moves:
        if move.to:
            heap.set_moved(move, plan.segment)
        else:
            heap.set_bare(move.segment, move.address, move.nbytes)
    for address, nbytes in plan.fresh:
        heap.set_mapped(plan.segment, address, nbytes)
    give_up(heap, plan)


def give_up(heap: Heap, plan: Plan) -> None:
    for move in plan.moves:
        heap.let_go(move.segment, move.address, move.nbytes)
    if plan.nbytes:
        heap.let_go(plan.segment, plan.address, plan.nbytes)


def grown(heap: Heap, nbytes: int, stream: int = 0, room: int = LOTS) -> int:
    """Take a block, behind which memory is put first."""
    carry_out(heap, planned(heap, nbytes, stream, room))
    block = heap.take(nbytes, stream)
    assert block
    return block


def finish(heap: Heap, stream: int) -> None:
    heap.mark_done(stream, heap.close_epoch(stream))


def state(heap: Heap) -> tuple[object, ...]:
    return heap.blocks(), heap.handles(), heap.counts(), heap.segments()


# -- the twin --------------------------------------------------------------------------------------------------------


def live_through(seed: int, steps: int, twin: type[ReferenceHeap] | None = None) -> None:
    draw = random.Random(seed)
    pair = PagedPair(twin, late=seed % 4 == 3, strategy="good_fit" if seed % 5 == 4 else "best_fit")
    for _ in range(steps):
        paged_step(pair, draw)
        pair.compare()


@pytest.mark.parametrize("seed", range(25))
def test_long_histories_are_equal_step_by_step(seed: int) -> None:
    """Whatever is taken, freed, planned, carried out, broken off or given up, both answer alike and stay sound."""
    live_through(seed, 200)


@pytest.mark.parametrize("seed", range(20))
def test_histories_that_nobody_looks_into_are_equal(seed: int) -> None:
    """What was noted before and is not noted again changes neither which memory serves nor which is idle."""
    draw = random.Random(seed)
    pair = PagedPair()
    for _ in range(30):
        for _ in range(draw.randrange(1, 20)):
            if draw.random() < 0.3:
                paged_step(pair, draw)
            pair.take(draw.choice((70_000, 9 * PAGE, draw.randrange(1, 1 << draw.randrange(10, 20)))), 0, (0, -1))
            if pair.live:
                pair.free(-1)
        pair.compare()


@pytest.mark.parametrize("seed", range(6))
def test_uses_of_many_frees_are_those_of_each(seed: int) -> None:
    """However much is freed before somebody looks, handles wait for what each free says, in the order of frees."""
    draw = random.Random(seed)
    pair = PagedPair()
    for _ in range(2):
        pair.add_stream()
    epochs = [1] * pair.streams  # the open one of each
    for _ in range(3):
        for _ in range(4):
            plan = pair.plan(draw.choice((3000, 70_000, 300_000)), draw.randrange(3), -1, LOTS, LOTS)
            assert plan is not None
            pair.carry_out(plan)
        for _ in range(500):
            stream = draw.randrange(3)
            pair.take(draw.choice((3000, 9000, 70_000, draw.randrange(1, 1 << 19))), stream, (0, -1))
            if len(pair.live) > draw.randrange(8):
                other = draw.randrange(3)
                use = (other, draw.randrange(1, epochs[other] + 1))
                pair.free(draw.randrange(len(pair.live)), [use] if draw.random() < 0.2 else [])
            if draw.random() < 0.05:
                pair.finish(stream)
                epochs[stream] += 1
        pair.compare()
        for one in range(pair.streams):
            pair.finish(one)
            epochs[one] += 1
        if plan := pair.reclaim(draw.choice((1 << 13, 1 << 18))):
            pair.carry_out(plan)
        pair.compare()


def test_a_free_of_many_handles_is_unfenced(heap: Heap) -> None:
    """Until a fence covers it."""
    block = grown(heap, 32 * PAGE, stream=1)
    assert len(heap.handles()) > 8
    heap.free(block)
    assert list(heap.unfenced()) == [1]
    heap.publish(1, heap.close_epoch(1))
    assert not heap.unfenced()


class ForgetsUses(ReferenceHeap):
    @override
    def stamp(self, handle: Handle, entries: Entries) -> None:
        handle.uses = entries


class ServesBareBlocks(ReferenceHeap):
    @override
    def serves(self, block: Block, search: Search) -> bool:
        return True


class CachesPages(ReferenceHeap):
    @override
    def cacheable(self, granules: int) -> bool:
        return True


class KeepsTheFirstOrder(ReferenceHeap):
    @override
    def make_newest(self, handle: Handle) -> None:
        handle.freed = handle.freed or self.freed


class JoinsWhatIsDone(ReferenceHeap):
    @override
    def reunite(self, block: Block) -> Block:
        return self.join(block)


class ForgetsUsesOfWhatMoved(ReferenceHeap):
    @override
    def bring_uses(self, block: Block, handle: Handle) -> None:
        pass


class MovesWhatOthersUse(ReferenceHeap):
    @override
    def ready(self, handle: Handle, early: int | None) -> bool:
        return early is not None or super().ready(handle, early)


class GoesAroundNothing(ReferenceHeap):
    @override
    def go_around(self, around: bool) -> None:
        pass


class LooksAtOneAddress(ReferenceHeap):
    @override
    def places(self, space: Space, start: int, end: int, size: int, *, at_end: bool) -> set[int]:
        return {start}


class JoinsWhatOthersUse(ReferenceHeap):
    @override
    @classmethod
    def alike(cls, a: Block, b: Block) -> bool:
        return not a.entries or not b.entries or super().alike(a, b)


class NotesOneUseOfAStream(ReferenceHeap):
    @override
    def note(self, block: Block, entries: Entries) -> None:
        handles = self.behind(block)
        if not handles or any(not (entries.keys() <= handle.uses.keys()) for handle in handles):
            super().note(block, entries)


BROKEN = [ForgetsUses, NotesOneUseOfAStream, ServesBareBlocks, CachesPages, KeepsTheFirstOrder, JoinsWhatIsDone]
BROKEN += [ForgetsUsesOfWhatMoved, MovesWhatOthersUse, GoesAroundNothing, LooksAtOneAddress, JoinsWhatOthersUse]


@pytest.mark.parametrize("broken", BROKEN, ids=lambda kind: kind.__name__)
def test_a_broken_rule_is_seen(broken: type[ReferenceHeap]) -> None:
    """A twin with one rule about memory broken differs within a few histories."""
    with pytest.raises(AssertionError):
        live_through_many(live_through, broken)


# -- promises --------------------------------------------------------------------------------------------------------


def test_a_space_begins_without_memory(heap: Heap) -> None:
    """Addresses alone reserve nothing, serve nothing, and are gone when the space is."""
    assert heap.reserved() == 0
    assert heap.take(PAGE, 0) == 0
    assert [(one.nbytes, one.state) for one in heap.blocks()] == [(PAGES * PAGE, "bare")]
    heap.remove_space(0)
    assert heap.blocks() == []
    heap.add_space(BASE, PAGE, 1, PAGE)
    heap.check()


def test_a_request_gets_exactly_the_pages_that_it_lies_on(heap: Heap) -> None:
    """Memory is as large as the request in whole pages, and what is left of the last page serves the next one."""
    grown(heap, 3 * PAGE - 5000)
    assert heap.reserved() == 3 * PAGE
    carry_out(heap, planned(heap, PAGE))
    assert heap.reserved() == 4 * PAGE
    second = heap.take(PAGE, 0)
    assert heap.info(second).address == BASE + 3 * PAGE - 4608
    heap.check()


def test_handles_grow_with_the_request(heap: Heap) -> None:
    """A large request gets few handles, none of them above a sixteenth of it; each goes as a whole."""
    heap.free(grown(heap, 32 * PAGE))
    assert {one.nbytes for one in heap.handles()} == {2 * PAGE}
    assert len(heap.handles()) == 16
    finish(heap, 0)
    assert heap.reclaim(1) is not None
    with pytest.raises(ValueError, match="as a whole"):
        heap.set_bare(0, BASE, PAGE)
    heap.set_bare(0, BASE, 2 * PAGE)
    heap.check()


def test_a_plan_may_be_told_how_large_handles_are(heap: Heap) -> None:
    """Of a request cut in four, none is above a quarter."""
    plan = heap.plan(16 * PAGE, 0, room=LOTS, parts=4)
    assert isinstance(plan, Plan)
    assert [nbytes for _, nbytes in plan.fresh] == [4 * PAGE] * 4
    with pytest.raises(ValueError, match="parts"):
        heap.plan(PAGE, 0, parts=0)


def test_a_large_handle_that_nobody_uses_is_split(heap: Heap) -> None:
    """It goes back and comes again at its addresses, in parts of a power of two; in use or small, it stays."""
    plan = heap.plan(13 * PAGE, 0, room=LOTS, parts=1)
    assert isinstance(plan, Plan)
    carry_out(heap, plan)
    block = heap.take(12 * PAGE, 0)
    assert heap.plan_split(3 * PAGE, LOTS) is None
    heap.free(block)
    assert heap.plan_split(3 * PAGE, LOTS) is None  # the stream may still work there
    finish(heap, 0)
    assert heap.plan_split(7 * PAGE, LOTS) is None
    assert heap.plan_split(3 * PAGE, 1) is None
    plan = heap.plan_split(3 * PAGE, 4)
    assert plan is not None
    assert [nbytes for _, nbytes in plan.fresh] == [4 * PAGE, 4 * PAGE, 4 * PAGE, PAGE]
    give_up(heap, plan)
    plan = heap.plan_split(3 * PAGE, 7)
    assert plan is not None
    assert not heap.take(PAGE, 0)
    carry_out(heap, plan)
    assert [(one.address, one.nbytes) for one in heap.handles()] == [
        *((BASE + i * 2 * PAGE, 2 * PAGE) for i in range(6)), (BASE + 12 * PAGE, PAGE),
    ]  # fmt: skip
    assert heap.take(13 * PAGE, 0)
    heap.check()


def spare(heap: Heap, nbytes: int, room: int) -> tuple[tuple[int, int], ...]:
    plan = heap.plan(nbytes, 0, room=LOTS, parts=1, spare=room)
    assert isinstance(plan, Plan)
    carry_out(heap, plan)
    assert heap.take(nbytes, 0)
    heap.check()
    return plan.fresh


def test_new_memory_may_go_on_behind_the_request(heap: Heap) -> None:
    """In the same handle, behind what is there already, as far as there are addresses."""
    assert spare(heap, PAGE, 4 * PAGE) == ((BASE, 5 * PAGE),)
    assert heap.take(PAGE, 0)
    assert spare(heap, 7 * PAGE, 3 * PAGE) == ((BASE + 5 * PAGE, 7 * PAGE),)
    assert heap.plan(PAGES * PAGE, 0, room=LOTS, spare=PAGE) == ()
    assert spare(heap, (PAGES - 13) * PAGE, 64 * PAGE) == ((BASE + 12 * PAGE, (PAGES - 12) * PAGE),)


def test_memory_behind_a_request_ends_where_there_is_some(heap: Heap) -> None:
    """It fills the hole that the request lies in, and no more; what moves brings nothing with it."""
    first, _last = grown(heap, 4 * PAGE), grown(heap, PAGE)
    heap.free(first)
    finish(heap, 0)
    idle = heap.reclaim(LOTS)
    assert idle is not None
    carry_out(heap, idle)
    assert spare(heap, PAGE, 32 * PAGE) == ((BASE, 4 * PAGE),)
    assert heap.reserved() == 5 * PAGE


def test_small_blocks_begin_with_little_memory_ahead() -> None:
    """Two pages, or half of what they have."""
    heap = Heap()
    heap.add_space(BASE, PAGES * PAGE, 0, PAGE)
    assert spare(heap, 1000, 32 * PAGE) == ((BASE, 2 * PAGE),)
    assert spare(heap, PAGE // 3, 0) == ()


def test_room_is_for_all_gaps_together(heap: Heap) -> None:
    """What one gap takes of the room is not there for the next."""
    low, middle, high = (grown(heap, PAGE) for _ in range(3))
    heap.free_many([low, high])
    finish(heap, 0)
    idle = heap.reclaim(LOTS)
    assert idle is not None
    carry_out(heap, idle)
    heap.free(middle)
    assert heap.plan(3 * PAGE, 0, room=PAGE, most=0) == ()
    plan = heap.plan(3 * PAGE, 0, room=2 * PAGE, most=0)
    assert isinstance(plan, Plan)
    assert plan.fresh == ((BASE, PAGE), (BASE + 2 * PAGE, PAGE))


def test_what_has_been_idle_longest_is_moved_first(heap: Heap) -> None:
    """Beyond the room, memory comes from below free blocks, in the order in which they became free."""
    blocks = [grown(heap, PAGE) for _ in range(4)]
    addresses = [heap.info(block).address for block in blocks]
    for which in (2, 0):
        heap.free(blocks[which])
    finish(heap, 0)
    plan = planned(heap, 2 * PAGE, room=0)
    assert [move.address for move in plan.moves] == [addresses[2], addresses[0]]
    assert [move.to for move in plan.moves] == [plan.address, plan.address + PAGE]
    assert plan.fresh == ()
    carry_out(heap, plan)
    assert heap.take(2 * PAGE, 0)
    assert heap.reserved() == 4 * PAGE
    heap.check()


def test_memory_freed_again_has_been_idle_since_then(heap: Heap) -> None:
    """What is freed once more, behind a fence, is the last to be moved, though it was the first to be freed."""
    first, second, _ = (grown(heap, PAGE) for _ in range(3))
    addresses = [heap.info(first).address, heap.info(second).address]
    heap.free(first)
    heap.free(second)
    finish(heap, 0)
    again = heap.take(PAGE, 0)
    assert heap.info(again).address == addresses[0]
    heap.free(again)
    finish(heap, 0)
    plan = heap.reclaim(2 * PAGE)
    assert plan is not None
    assert [move.address for move in plan.moves] == addresses[::-1]


def test_what_is_freed_again_before_a_fence_makes_no_memory_newer(heap: Heap) -> None:
    """It says nothing new, and costs nothing: for what lay within the block freed last, and for all freed before."""
    blocks = [grown(heap, 2 * PAGE), grown(heap, PAGE)]
    start = heap.info(blocks[0]).address
    addresses = [start, start + PAGE, heap.info(blocks[1]).address]
    for block in blocks:
        heap.free(block)
    heap.free(heap.take(PAGE, 0) or 0)
    again = heap.take(PAGE, 0)
    assert heap.info(again).address in addresses
    heap.free(again)
    finish(heap, 0)
    plan = heap.reclaim(3 * PAGE)
    assert plan is not None
    assert [move.address for move in plan.moves] == addresses


def test_new_memory_knows_no_use_of_what_lay_there_before(heap: Heap) -> None:
    """A free is noted at memory that came since the last one, though nothing else has happened in between."""
    first, _ = grown(heap, PAGE), grown(heap, PAGE)
    address = heap.info(first).address
    heap.free(first)
    plan = planned(heap, 2 * PAGE, room=PAGE)
    assert [move.address for move in plan.moves] == [address]
    carry_out(heap, plan)
    heap.take(2 * PAGE, 0)
    carry_out(heap, planned(heap, PAGE))
    again = heap.take(PAGE, 0)
    assert heap.info(again).address == address
    heap.free(again)
    assert [list(one.entries) for one in heap.handles() if one.address == address] == [[(0, 1)]]


def test_the_last_use_of_memory_counts_however_much_was_freed_before(heap: Heap) -> None:
    """No free is forgotten, be it the first or the thousandth since somebody looked at what memory waits for."""
    nbytes = 16 * PAGE
    blocks = [grown(heap, nbytes), grown(heap, nbytes)]
    for frees in range(600):
        for _ in range(frees):
            heap.free(blocks.pop(0))
            blocks.append(heap.take(nbytes, 0) or 0)
        finish(heap, 0)
        heap.free(blocks.pop(0))
        assert heap.reclaim(nbytes) is None
        blocks.append(heap.take(nbytes, 0) or 0)


def test_memory_let_go_comes_behind_what_was_freed_meanwhile(heap: Heap) -> None:
    """What a plan has held and left alone has not been idle for longer than what was freed before it was let go."""
    first, _, second, _ = (grown(heap, PAGE) for _ in range(4))
    addresses = [heap.info(first).address, heap.info(second).address]
    heap.free(first)
    finish(heap, 0)
    held = heap.reclaim(PAGE)
    assert held is not None
    heap.free(second)
    heap.let_go(held.moves[0].segment, held.moves[0].address, held.moves[0].nbytes)
    finish(heap, 0)
    plan = heap.reclaim(2 * PAGE)
    assert plan is not None
    assert [move.address for move in plan.moves] == addresses[::-1]


def test_memory_too_large_for_a_gap_is_released_for_new() -> None:
    """A handle that fits nowhere makes room by its going, so the whole is not more than before."""
    heap = Heap()
    heap.add_space(BASE, 1024 * PAGE, 1, PAGE)
    first, _, second, _ = (grown(heap, pages * PAGE) for pages in (64, 1, 32, 1))
    heap.free_many([first, second])
    finish(heap, 0)
    plan = planned(heap, 65 * PAGE, room=0)
    assert [move.nbytes // PAGE for move in plan.moves] == [4] * 16 + [2]
    assert plan.moves[-1].to == 0
    assert [nbytes for _, nbytes in plan.fresh] == [PAGE]
    carry_out(heap, plan)
    assert heap.reserved() == (64 + 32 + 2 - 1) * PAGE
    assert heap.counts().peak_reserved == (64 + 32 + 2) * PAGE
    heap.check()


def test_memory_in_use_stays_where_it_is(heap: Heap) -> None:
    """What a stream may still touch is neither moved nor released; the entries to wait for are named instead."""
    block = grown(heap, 2 * PAGE)
    other = grown(heap, 2 * PAGE)
    heap.free(block, [(1, 1)])
    assert heap.reclaim(LOTS) is None
    assert heap.plan(4 * PAGE, 0, most=2 * PAGE) == ((0, 1), (1, 1))
    finish(heap, 0)
    assert heap.plan(4 * PAGE, 0, most=2 * PAGE) == ((1, 1),)
    assert heap.plan(4 * PAGE, 0, most=PAGE) == ()
    with pytest.raises(ValueError, match="in use"):
        heap.set_bare(0, BASE, PAGE)
    finish(heap, 1)
    plan = heap.plan(4 * PAGE, 0, most=2 * PAGE)
    assert isinstance(plan, Plan)
    assert len(plan.moves) == len(plan.fresh) == 2
    carry_out(heap, plan)
    heap.free(other)
    heap.check()


def test_a_wait_is_for_the_latest_use_of_each_stream(heap: Heap) -> None:
    """Where the memory that is needed was used in several epochs of a stream, the last of them is named."""
    first, second, _ = (grown(heap, 2 * PAGE) for _ in range(3))
    heap.free(first)
    heap.close_epoch(0)
    heap.free(second)
    assert heap.plan(6 * PAGE, 0, most=4 * PAGE, early=False) == ((0, 1),)
    assert heap.plan(6 * PAGE, 0, most=2 * PAGE, early=False) == ((0, 2),)


def test_only_memory_that_could_be_taken_is_waited_for() -> None:
    """What is live again, or lies where the request goes, does not count among what a wait would bring."""
    heap = Heap()
    heap.add_space(BASE, 256 * PAGE, 1, PAGE)
    blocks = [grown(heap, PAGE) for _ in range(66)]
    taken, last = grown(heap, 2 * PAGE), grown(heap, 2 * PAGE)
    heap.free_many(blocks[::2])
    heap.free(taken)
    assert heap.take(2 * PAGE, 0) == taken
    heap.free(last)
    assert heap.plan(42 * PAGE, 0, most=6 * PAGE, early=False) == ()
    assert heap.plan(42 * PAGE, 0, most=7 * PAGE, early=False) == ((0, 1),)


def test_blocks_of_a_page_or_more_are_not_cached() -> None:
    """A cached block would keep its memory; what was cached before there was a space is placed from then on too."""
    heap = Heap()
    heap.add_segment(1 << 30, 4 * PAGE, 1, 0)
    for _ in range(3):
        heap.free(heap.take(PAGE, 0))
    assert heap.counts().cached == PAGE
    heap.add_space(BASE, PAGES * PAGE, 1, PAGE)
    assert heap.counts().cached == 0
    for _ in range(3):
        heap.free(heap.take(PAGE, 0))
        assert heap.counts().cached == 0
    heap.remove_space(1)
    for _ in range(3):
        heap.free(heap.take(PAGE, 0))
    assert heap.counts().cached == PAGE
    heap.check()


def test_uses_inside_a_lease_are_uses_of_its_memory(heap: Heap) -> None:
    """What another stream did inside a lease keeps the memory from being taken, after the lease as well."""
    outer = grown(heap, 2 * PAGE)
    arena, account = heap.open_lease(outer), heap.add_account(-1)
    found = heap.take_foreign(PAGE, 1, account, arena, late=True)
    assert found is not None
    heap.free(found[0])
    heap.close_lease(arena)
    finish(heap, 0)
    assert heap.handles()[0].entries == ((1, 1),)
    finish(heap, 1)
    heap.merge()
    plan = heap.reclaim(LOTS)
    assert plan is not None
    assert len(plan.moves) == 2
    heap.check()


def test_a_page_below_two_blocks_is_idle_once_they_are_one(heap: Heap) -> None:
    """A page on which blocks of two streams meet is not taken while they lie apart, and is found when they join."""
    low = grown(heap, PAGE + PAGE // 2)
    high = grown(heap, PAGE + PAGE // 2, 1)
    heap.free(low)
    heap.free(high)
    for stream in (0, 1):
        finish(heap, stream)
    plan = heap.reclaim(LOTS)
    assert plan is not None
    assert [move.address for move in plan.moves] == [BASE, BASE + 2 * PAGE]
    give_up(heap, plan)
    heap.merge()
    plan = heap.reclaim(LOTS)
    assert plan is not None
    assert len(plan.moves) == 3
    heap.check()


@pytest.mark.parametrize("seed", range(5))
def test_new_memory_comes_only_once_all_that_is_idle_has_moved(seed: int) -> None:
    """In handles of a page, though no use of them is known to be done: one stream's work is in order."""
    draw, heap = random.Random(seed), Heap()
    live: list[int] = []
    heap.add_space(BASE, 16 * PAGES * PAGE, 1, PAGE)
    heap.go_around(True)
    grew = 0
    for _ in range(300):
        if live and (draw.random() < 0.5 or heap.live() > 40 * PAGE):
            heap.free(live.pop(draw.randrange(len(live))))
            continue
        nbytes = draw.randrange(PAGE // 2, 9 * PAGE)
        if not (block := heap.take(nbytes, 0)):
            plan = heap.plan(nbytes, 0, parts=LOTS)
            assert isinstance(plan, Plan)
            grew += bool(plan.fresh)
            if plan.fresh:
                assert heap.idle_memory() == (0, ())
            carry_out(heap, plan)
            block = heap.take(nbytes, 0)
            assert block
        live.append(block)
        heap.check()
    assert grew >= 10


def test_takes_go_around_what_has_no_memory_at_its_front(heap: Heap) -> None:
    """If they are to, any memory that is large enough serves; else a take lacks pages."""
    blocks = [grown(heap, nbytes * PAGE) for nbytes in (1, 1, 3, 1, 5, 1)]
    for block in blocks[::2]:
        heap.free(block)
    heap.mark_done(0, heap.close_epoch(0))
    hole = heap.reclaim(PAGE)
    assert hole is not None
    carry_out(heap, hole)
    assert (heap.take(PAGE, 0), heap.last_reason()) == (0, REASON_PAGES)
    heap.go_around(True)
    heap.go_around(False)
    assert (heap.take(PAGE, 0), heap.last_reason()) == (0, REASON_PAGES)
    heap.go_around(True)
    assert heap.info(heap.take(PAGE, 0)).address == BASE + 2 * PAGE
    heap.check()


def test_free_blocks_end_where_memory_does(heap: Heap) -> None:
    """As long as takes go around holes; what is bare beside the end belongs to it."""
    heap.go_around(True)
    heap.free(grown(heap, 6 * PAGE))
    heap.mark_done(0, heap.close_epoch(0))
    for _ in range(2):
        hole = heap.reclaim(PAGE)
        assert hole is not None
        carry_out(heap, hole)
    assert [(one.state, one.nbytes // PAGE) for one in heap.blocks()] == [("bare", 2), ("free", 4), ("bare", PAGES - 6)]
    assert heap.spread() == 6 * PAGE
    heap.go_around(False)
    assert [(one.state, one.nbytes // PAGE) for one in heap.blocks()] == [("free", 6), ("bare", PAGES - 6)]
    heap.go_around(True)
    hole = heap.reclaim(LOTS)
    assert hole is not None
    carry_out(heap, hole)
    assert [(one.state, one.nbytes // PAGE) for one in heap.blocks()] == [("bare", PAGES)]
    assert heap.spread() == 0
    heap.check()


@pytest.mark.parametrize("stream", [0, 1])
def test_a_request_lies_where_the_least_is_missing(heap: Heap, stream: int) -> None:
    """Across free blocks and what is bare between them, but not on what another stream still uses."""
    heap.go_around(True)
    hole, low, bare, high, _last = (grown(heap, nbytes * PAGE) for nbytes in (1, 2, 2, 2, 1))
    heap.free_many([hole, bare])
    finish(heap, 0)
    idle = heap.reclaim(LOTS)
    assert idle is not None
    carry_out(heap, idle)
    heap.free_many([low, high])
    plan = heap.plan(5 * PAGE, stream, room=LOTS, parts=1)
    assert isinstance(plan, Plan)
    end = BASE + 8 * PAGE
    assert plan.fresh == (((BASE + 3 * PAGE, 2 * PAGE),) if stream == 0 else ((end, 5 * PAGE),))
    carry_out(heap, plan)
    assert heap.info(heap.take(5 * PAGE, stream)).address == (BASE + PAGE if stream == 0 else end)
    heap.check()


def test_what_moved_is_behind_what_its_stream_did(heap: Heap) -> None:
    """It serves its own stream at once, and another one behind the use that it brought along."""
    first, _second = grown(heap, 2 * PAGE), grown(heap, PAGE)
    heap.free(first)
    heap.go_around(True)
    plan = heap.plan(3 * PAGE, 0)
    assert isinstance(plan, Plan)
    assert [(move.nbytes, move.uses) for move in plan.moves] == [(PAGE, ((0, 1),))] * 2
    carry_out(heap, plan)
    assert heap.take_foreign(2 * PAGE, 1) is None
    heap.publish(0, heap.close_epoch(0))
    assert heap.take(2 * PAGE, 1) == 0
    other = heap.take_foreign(2 * PAGE, 1)
    assert other is not None
    assert other[1] == ((0, 1),)
    heap.put_back(*other)
    assert heap.take(2 * PAGE, 0)
    heap.check()


def test_wrong_moves_change_nothing(heap: Heap) -> None:
    """A handle moves as a whole, once it is lifted, to addresses that are held and bare."""
    first, _second = grown(heap, 2 * PAGE), grown(heap, PAGE)
    heap.free(first)
    plan = heap.plan(6 * PAGE, 0)
    assert isinstance(plan, Plan)
    before, move = state(heap), plan.moves[0]
    for wrong in (
        move._replace(nbytes=2 * PAGE), move._replace(address=BASE + PAGE // 2), move._replace(segment=9),
        move._replace(to=BASE), move._replace(to=move.to + 512), move._replace(to=BASE + (PAGES - 1) * PAGE),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=r"moved as a whole|held|space"):
            heap.set_moved(wrong, plan.segment)
        assert state(heap) == before
    with pytest.raises(ValueError, match="space"):
        heap.set_moved(move, 9)
    assert state(heap) == before
    heap.set_moved(move, plan.segment)
    with pytest.raises(ValueError, match=r"moved as a whole|held|space"):
        heap.set_moved(move, plan.segment)
    heap.check()


def test_a_miss_says_whether_only_memory_is_lacking(heap: Heap) -> None:
    """Addresses without memory are another reason than no addresses, by every way to take."""
    assert (heap.take(PAGE, 0), heap.last_reason()) == (0, REASON_MEMORY)
    heap.free(grown(heap, 3 * PAGE))
    finish(heap, 0)
    given = heap.reclaim(LOTS)
    assert given is not None
    carry_out(heap, given)
    assert (heap.take(PAGE, 0), heap.last_reason()) == (0, REASON_PAGES)
    assert (heap.take_foreign(PAGE, 1, late=True), heap.last_reason()) == (None, REASON_PAGES)
    assert (heap.take_many([PAGE], 0), heap.last_reason()) == ([], REASON_PAGES)
    assert (heap.take(4 * PAGE, 0), heap.last_reason()) == (0, REASON_MEMORY)
    assert (heap.has_addresses(3 * PAGE, 0), heap.has_addresses(4 * PAGE, 0)) == (True, False)


def test_what_is_asked_again_teaches_the_caches_nothing() -> None:
    """A small size is hot once it was asked for twice; one request that is made again is one."""

    def blocks_cached(*, again: bool) -> int:
        heap = Heap()
        heap.add_segment(BASE, PAGE, 0, 0)
        heap.free(heap.take(4096, 0))
        heap.free(heap.take(4096, 0, again=again))
        return heap.counts().cached_blocks

    assert (blocks_cached(again=False), blocks_cached(again=True)) == (1, 0)


def test_a_plan_keeps_to_what_its_stream_may_use(heap: Heap) -> None:
    """Without foreign memory it takes new addresses beside another stream's, and joins nothing that waits for it."""
    heap.free(grown(heap, 2 * PAGE, stream=1))
    assert (heap.has_addresses(PAGE, 0), heap.has_addresses(PAGE, 0, foreign=False)) == (True, False)
    assert not heap.has_addresses(PAGE, 0, late=False)
    plan = heap.plan(PAGE, 0, room=LOTS, foreign=False)
    assert isinstance(plan, Plan)
    assert plan.address == BASE + 2 * PAGE
    carry_out(heap, plan)
    assert heap.info(heap.take(PAGE, 0)).address == plan.address
    heap.publish(1, heap.close_epoch(1))
    assert heap.has_addresses(PAGE, 0, late=False)


@pytest.mark.parametrize("foreign", [True, False])
def test_a_plan_that_cannot_be_uses_no_addresses(heap: Heap, foreign: bool) -> None:
    """Who asks for it again and again does not eat up the space."""
    held, freed = grown(heap, 2 * PAGE, stream=1), grown(heap, 2 * PAGE, stream=1)
    heap.free(freed)
    for _ in range(3):
        assert heap.plan(4 * PAGE, 0, most=0, foreign=foreign) in {(), ((1, 1),)}
        heap.merge()
        assert heap.spread() == 4 * PAGE
    heap.free(held)


def test_idle_memory_and_the_fences_that_it_lacks_are_told(heap: Heap) -> None:
    """Bytes on which nothing lies, their uses, and the streams that have freed since their last fence."""
    held, freed = grown(heap, 2 * PAGE), grown(heap, 3 * PAGE, stream=1)
    assert (heap.idle_memory(), heap.unfenced(), heap.spread()) == ((0, ()), [], 5 * PAGE)
    heap.free(freed)
    assert (heap.idle_memory(), heap.unfenced()) == ((3 * PAGE, ((1, 1),)), [1])
    heap.publish(1, heap.close_epoch(1))
    assert (heap.idle_memory(), heap.unfenced()) == ((3 * PAGE, ((1, 1),)), [])
    heap.mark_done(1, 1)
    given = heap.reclaim(LOTS)
    assert given is not None
    carry_out(heap, given)
    assert (heap.idle_memory(), heap.reserved(), heap.spread()) == ((0, ()), 2 * PAGE, 5 * PAGE)
    heap.free(held)


def test_a_plan_given_up_leaves_all_as_it_was(heap: Heap) -> None:
    """What is lifted serves nobody; let go without a step done, every block and gauge is what it was before."""
    blocks = [grown(heap, PAGE) for _ in range(4)]
    for block in blocks[::2]:
        heap.free(block)
    finish(heap, 0)
    heap.reset_peaks()
    give_up(heap, planned(heap, 2 * PAGE, room=0))
    before = heap.blocks(), heap.handles(), heap.counts()._replace(misses=0)
    plan = planned(heap, 2 * PAGE, room=0)
    assert heap.counts().lifted == 2 * PAGE
    assert heap.take(PAGE, 0) == 0
    heap.check()
    give_up(heap, plan)
    assert (heap.blocks(), heap.handles(), heap.counts()._replace(misses=0)) == before


def test_steps_that_were_done_before_a_failure_count(heap: Heap) -> None:
    """When the driver fails half way, what has memory by then serves, and what has none does not."""
    plan = planned(heap, 3 * PAGE)
    heap.set_mapped(plan.segment, *plan.fresh[0])
    give_up(heap, plan)
    heap.check()
    assert heap.reserved() == heap.counts().free == PAGE
    assert heap.take(3 * PAGE, 0) == 0
    assert heap.info(heap.take(PAGE, 0)).address == plan.address


def test_a_small_space_is_used_up_to_its_last_page(heap: Heap) -> None:
    """When no address is left a plan is impossible, and no fence would help; a free makes it possible again."""
    assert heap.plan(PAGES * PAGE + 1, 0) == ()
    give_up(heap, planned(heap, PAGES * PAGE))
    blocks = [grown(heap, PAGE) for _ in range(PAGES)]
    before = state(heap)
    assert heap.plan(PAGE, 0) == ()
    assert heap.plan(PAGES * PAGE + 1, 0) == ()
    assert state(heap) == before
    heap.free(blocks[3])
    assert isinstance(heap.plan(PAGE, 0), Plan)
    heap.check()


def test_a_request_of_an_arena_without_a_space_has_no_plan(heap: Heap) -> None:
    """Small blocks have no space here, and the inside of a lease never has one."""
    assert heap.plan(512, 0) == ()
    assert heap.plan(PAGE, 0, arena=heap.open_lease(grown(heap, PAGE))) == ()


def test_ordinary_segments_serve_beside_a_space(heap: Heap) -> None:
    """Where another search finds a block of a segment, the plan has nothing to do; segments alone can be empty."""
    heap.add_segment(1 << 30, PAGE, 1, 1)
    assert heap.take(PAGE, 0) == 0
    assert planned(heap, PAGE) == Plan(1, 1 << 30, 0, (), ())
    assert heap.take_foreign(PAGE, 0, late=True) is not None
    grown(heap, PAGE)
    with pytest.raises(ValueError, match="unknown segment"):
        heap.remove_segment(0)
    assert heap.empty_segments() == []
    heap.check()


# -- wrong arguments -------------------------------------------------------------------------------------------------


@pytest.fixture
def busy(heap: Heap) -> Heap:
    """Four pages with memory, of which the first two are lifted, the others live; then three lifted ones without."""
    blocks = [grown(heap, PAGE) for _ in range(4)]
    for block in blocks[:2]:
        heap.free(block)
    finish(heap, 0)
    assert heap.reclaim(2 * PAGE) is not None
    planned(heap, 3 * PAGE)
    return heap


WRONG: dict[str, Callable[[Heap], object]] = {
    "lease's arena": lambda heap: heap.add_space(BASE << 1, PAGE, 2, PAGE),
    "arena that has one": lambda heap: heap.add_space(BASE << 1, PAGE, 1, PAGE),
    "page no power of two": lambda heap: heap.add_space(BASE << 1, 3 * PAGE, 0, 3 * PAGE),
    "page below a granule": lambda heap: heap.add_space(BASE << 1, PAGE, 0, 256),
    "no page size": lambda heap: heap.add_space(BASE << 1, PAGE, 0, 0),
    "address between pages": lambda heap: heap.add_space(BASE + 512, PAGE, 0, PAGE),
    "size between pages": lambda heap: heap.add_space(BASE << 1, PAGE + 512, 0, PAGE),
    "space of no size": lambda heap: heap.add_space(BASE << 1, 0, 0, PAGE),
    "negative address": lambda heap: heap.add_space(-PAGE, PAGE, 0, PAGE),
    "space too large": lambda heap: heap.add_space(1 << 60, 2 * MAX_SIZE, 0, PAGE),
    "too many pages": lambda heap: heap.add_space(1 << 60, MAX_SIZE, 0, 512),
    "unknown space removed": lambda heap: heap.remove_space(7),
    "space with memory removed": lambda heap: heap.remove_space(0),
    "plan for nothing": lambda heap: heap.plan(0, 0),
    "plan for too much": lambda heap: heap.plan(MAX_SIZE + 1, 0),
    "plan for an unknown stream": lambda heap: heap.plan(PAGE, 9),
    "plan in an unknown arena": lambda heap: heap.plan(PAGE, 0, arena=9),
    "negative room": lambda heap: heap.plan(PAGE, 0, room=-1),
    "negative most": lambda heap: heap.plan(PAGE, 0, most=-1),
    "negative reclaim": lambda heap: heap.reclaim(-1),
    "mapped in an unknown space": lambda heap: heap.set_mapped(7, BASE + 4 * PAGE, PAGE),
    "mapped where nothing is held": lambda heap: heap.set_mapped(0, BASE + 3 * PAGE, PAGE),
    "mapped below all that is held": lambda heap: heap.set_mapped(0, BASE - PAGE, PAGE),
    "mapped twice": lambda heap: heap.set_mapped(0, BASE, PAGE),
    "mapped between pages": lambda heap: heap.set_mapped(0, BASE + 4 * PAGE + 512, PAGE),
    "mapped half a page": lambda heap: heap.set_mapped(0, BASE + 4 * PAGE, PAGE // 2),
    "mapped no page": lambda heap: heap.set_mapped(0, BASE + 4 * PAGE, 0),
    "mapped more than is held": lambda heap: heap.set_mapped(0, BASE + 4 * PAGE, 4 * PAGE),
    "mapped up to where addresses wrap": lambda heap: heap.set_mapped(0, BASE + 5 * PAGE, 2**63 - PAGE),
    "mapped above all that is held": lambda heap: heap.set_mapped(0, BASE + 20 * PAGE, PAGE),
    "bare in an unknown space": lambda heap: heap.set_bare(7, BASE, PAGE),
    "bare where no handle is": lambda heap: heap.set_bare(0, BASE + 4 * PAGE, PAGE),
    "bare in the middle": lambda heap: heap.set_bare(0, BASE + 512, PAGE),
    "bare larger than a handle": lambda heap: heap.set_bare(0, BASE, 2 * PAGE),
    "bare below a live block": lambda heap: heap.set_bare(0, BASE + 2 * PAGE, PAGE),
    "let go in an unknown space": lambda heap: heap.let_go(7, BASE, PAGE),
    "let go nothing": lambda heap: heap.let_go(0, BASE, 0),
    "let go of what is live": lambda heap: heap.let_go(0, BASE + 2 * PAGE, PAGE),
    "let go of more than is held": lambda heap: heap.let_go(0, BASE, 3 * PAGE),
    "let go of a part": lambda heap: heap.let_go(0, BASE + 4 * PAGE, PAGE),
    "let go from the middle": lambda heap: heap.let_go(0, BASE + 5 * PAGE, 2 * PAGE),
    "segment's removal of a space": lambda heap: heap.remove_segment(0),
}


@pytest.mark.parametrize("call", WRONG.values(), ids=WRONG.keys())
def test_wrong_arguments_change_nothing(busy: Heap, call: Callable[[Heap], object]) -> None:
    """Each is refused by a ValueError, and everything is as it was."""
    before = state(busy)
    with pytest.raises(ValueError, match=r"."):
        call(busy)
    assert state(busy) == before
    busy.check()


NO_INTS: dict[str, Callable[[Heap], object]] = {
    "add_space": lambda heap: heap.add_space(1.0, PAGE, 0, PAGE),  # type: ignore[arg-type]  # what is tested
    "remove_space": lambda heap: heap.remove_space("0"),  # type: ignore[arg-type]  # what is tested
    "plan": lambda heap: heap.plan(1.5, 0),  # type: ignore[arg-type]  # what is tested
    "room": lambda heap: heap.plan(PAGE, 0, room=None),  # type: ignore[arg-type]  # what is tested
    "reclaim": lambda heap: heap.reclaim(1e6),  # type: ignore[arg-type]  # what is tested
    "set_mapped": lambda heap: heap.set_mapped(0, BASE, 1.0),  # type: ignore[arg-type]  # what is tested
    "set_bare": lambda heap: heap.set_bare(0, None, PAGE),  # type: ignore[arg-type]  # what is tested
    "let_go": lambda heap: heap.let_go(0.0, BASE, PAGE),  # type: ignore[arg-type]  # what is tested
}


@pytest.mark.parametrize("call", NO_INTS.values(), ids=NO_INTS.keys())
def test_arguments_that_are_no_ints_change_nothing(busy: Heap, call: Callable[[Heap], object]) -> None:
    """A float is not cut down to an int: TypeError."""
    before = state(busy)
    with pytest.raises(TypeError, match="must be an int"):
        call(busy)
    assert state(busy) == before
