"""Taking memory back changes nothing about what is placed where, so a program never needs more for it."""

import random
from collections.abc import Iterator

import pytest

from asyncmem.core import Heap
from asyncmem.core.report import Plan

PAGE = 1 << 13
SPACE = 1 << 23
FIRST = 1 << 40
LOTS = 1 << 50


class Program:
    """A heap with two spaces, of which nothing is taken back unless its history says so."""

    def __init__(self, streams: int) -> None:
        self.heap = Heap(small_limit=1 << 16)
        for arena in (0, 1):
            self.heap.add_space((arena + 1) * FIRST, SPACE, arena, PAGE)
        for _ in range(streams - 1):
            self.heap.add_stream()
        self.live: list[int] = []
        self.inside: list[tuple[int, int]] = []

    def take(self, nbytes: int, stream: int, room: int) -> int:
        """Take a block, behind which memory is put where there is none, and return its address."""
        block = self.heap.take(nbytes, stream)
        if not block:
            plan = self.heap.plan(nbytes, stream, room=room, early=False)
            assert isinstance(plan, Plan)
            self.carry_out(plan)
            found = self.heap.take_foreign(nbytes, stream, late=True)
            assert found is not None
            block = found[0]
            assert self.heap.info(block).address == plan.address
        self.live.append(block)
        return self.heap.info(block).address

    def carry_out(self, plan: Plan) -> None:
        for move in plan.moves:
            if move.to:
                self.heap.set_moved(move, plan.segment)
            else:
                self.heap.set_bare(move.segment, move.address, move.nbytes)
        for address, nbytes in plan.fresh:
            self.heap.set_mapped(plan.segment, address, nbytes)
        for move in plan.moves:
            self.heap.let_go(move.segment, move.address, move.nbytes)
        if plan.nbytes:
            self.heap.let_go(plan.segment, plan.address, plan.nbytes)

    def give_back(self, nbytes: int) -> None:
        if plan := self.heap.reclaim(nbytes):
            self.carry_out(plan)

    def free(self, which: int, entries: list[tuple[int, int]]) -> None:
        self.heap.free(self.live.pop(which % len(self.live)), entries)

    def hand_over(self, which: int, stream: int) -> None:
        self.heap.set_home(self.live[which % len(self.live)], stream)

    def lease(self, which: int, sizes: list[int], stream: int) -> list[int]:
        """Open a lease on a live block, take and free inside, close it, and return where the inner blocks were."""
        arena = self.heap.open_lease(self.live.pop(which % len(self.live)))
        account = self.heap.add_account(-1)
        taken = [self.heap.take_foreign(nbytes, stream, account, arena, late=True) for nbytes in sizes]
        found = [one[0] for one in taken if one is not None]
        addresses = [self.heap.info(block).address for block in found]
        for block in found[::2]:
            self.heap.free(block)
        self.heap.close_lease(arena)
        self.heap.remove_account(account)
        self.live += found[1::2]
        return addresses

    def finish(self, stream: int) -> None:
        self.heap.mark_done(stream, self.heap.close_epoch(stream))

    def pages(self) -> set[int]:
        return {page for one in self.heap.handles() for page in range(one.address, one.address + one.nbytes, PAGE)}


def both_live_through(draw: random.Random, streams: int, steps: int) -> Iterator[tuple[Program, Program]]:
    """Let a program live with all that it was given, and with memory taken back; yield both after each step."""
    kept, lean = Program(streams), Program(streams)
    for _ in range(steps):
        choice, stream, which = draw.random(), draw.randrange(streams), draw.randrange(1 << 20)
        if choice < 0.45 and len(kept.live) < 40:
            nbytes = draw.choice((3000, 20_000, 70_000, draw.randrange(1, 1 << draw.randrange(9, 19))))
            room = draw.choice((0, 0, PAGE, 4 * PAGE, LOTS))
            assert kept.take(nbytes, stream, LOTS) == lean.take(nbytes, stream, room)
        elif choice < 0.75 and kept.live:
            entries = [(draw.randrange(streams), 1)] if draw.random() < 0.2 else []
            for program in (kept, lean):
                program.free(which, entries)
        elif choice < 0.8 and kept.live:
            for program in (kept, lean):
                program.hand_over(which, stream)
        elif choice < 0.83 and kept.live:
            sizes = [draw.randrange(1, 1 << 14) for _ in range(4)]
            assert kept.lease(which, sizes, stream) == lean.lease(which, sizes, stream)
        elif choice < 0.93:
            for program in (kept, lean):
                program.finish(stream)
        else:
            lean.give_back(draw.choice((PAGE, 16 * PAGE, LOTS)))
        yield kept, lean


@pytest.mark.parametrize("streams", [1, 3])
@pytest.mark.parametrize("seed", range(20))
def test_taking_back_moves_no_block_and_never_costs_memory(seed: int, streams: int) -> None:
    """Every block lies where it would lie if nothing were taken back, and memory only where there would be some."""
    for kept, lean in both_live_through(random.Random(seed), streams, 400):
        assert lean.pages() <= kept.pages()
        assert lean.heap.reserved() <= kept.heap.reserved()
        lean.heap.check()
    assert lean.heap.counts().peak_reserved < kept.heap.counts().peak_reserved


def test_a_plan_chooses_among_many_holes_as_take_does() -> None:
    """Where there are more holes of a size than take looks at, a plan for bare ones takes the one that take would."""
    kept, lean = Program(1), Program(1)
    for program in (kept, lean):
        for _ in range(40):
            program.take(2 * PAGE, 0, LOTS)
            program.take(PAGE, 0, LOTS)
        for hole in range(40):
            program.free(hole, [])
        program.finish(0)
    lean.give_back(LOTS)
    assert lean.heap.reserved() == 40 * PAGE
    lowest = min(block.address for block in kept.heap.blocks() if block.state == "free")
    assert kept.take(2 * PAGE, 0, LOTS) == lean.take(2 * PAGE, 0, LOTS) > lowest
