"""Histories with spaces: memory is put behind addresses, taken back, and sometimes the driver fails half way."""

import random
from typing import Unpack

from typing_extensions import override

from asyncmem.core import HeapOptions
from asyncmem.core.report import Move, Piece, Plan
from tests.reference import ReferenceHeap

from .history import Pair, random_step

PAGE = 1 << 13
SPACE = 1 << 22
FIRST = 1 << 40
LOTS = 1 << 50


class PagedPair(Pair):
    """The two heaps with a space in each arena (or one that comes late), and the plans that are under way."""

    def __init__(
        self, twin: type[ReferenceHeap] | None = None, *, late: bool = False, **options: Unpack[HeapOptions]
    ) -> None:
        super().__init__(twin, **({"small_limit": 1 << 16} | options))
        self.add_space(FIRST, SPACE // 4, 0)
        if not late:
            self.add_space(2 * FIRST, SPACE, 1)
        self.plans: list[Plan] = []
        self.left: list[Move] = []
        self.handed_out = 0
        self.around = False

    def add_space(self, address: int, nbytes: int, arena: int) -> int:
        return self.both(lambda heap: heap.add_space(address, nbytes, arena, PAGE))

    @override
    def compare(self) -> None:
        """Demand besides that handles are the same, their bytes what was mapped, and some below all live blocks."""
        super().compare()
        self.both(lambda heap: (heap.idle_memory(), heap.unfenced(), heap.spread()))
        handles = self.both(lambda heap: heap.handles())
        assert sum(handle.nbytes for handle in handles) == self.handed_out
        behind = {page for handle in handles for page in range(handle.address, handle.address + handle.nbytes, PAGE)}
        for fast, _ in self.live:
            start, nbytes = self.fast.info(fast).address, self.fast.info(fast).nbytes
            if start >= FIRST:
                assert behind.issuperset(range(start // PAGE * PAGE, start + nbytes, PAGE))

    def plan(
        self, nbytes: int, stream: int, arena: int, room: int, most: int,
        whose: tuple[bool, bool] = (True, True), parts: int = 16, *, early: bool = True,
    ) -> Plan | None:  # fmt: skip
        """Ask both for a plan; what it names is done with, or in use by its stream alone and on its way elsewhere."""
        self.both(lambda heap: heap.has_addresses(nbytes, stream, arena, *whose))
        answer = self.both(lambda heap: heap.plan(nbytes, stream, arena, room, most, *whose, parts, early=early))
        return self._lifted(answer, stream if early else None) if isinstance(answer, Plan) else None

    def reclaim(self, nbytes: int) -> Plan | None:
        plan = self.both(lambda heap: heap.reclaim(nbytes))
        return None if plan is None else self._lifted(plan)

    def split(self, size: int, most: int) -> Plan | None:
        plan = self.both(lambda heap: heap.plan_split(size, most))
        return None if plan is None else self._lifted(plan)

    def _lifted(self, plan: Plan, early: int | None = None) -> Plan:
        idle = {(one.segment, one.address, one.nbytes): one for one in self.both(lambda heap: heap.handles())}
        for move in plan.moves:
            uses = idle[move.segment, move.address, move.nbytes].entries
            assert uses == move.uses
            assert {stream for stream, _ in uses} <= ({early} if move.to else set())
        return plan

    def carry_out(self, plan: Plan, steps: int = LOTS) -> None:
        """Do up to so many steps of the driver's, and let all go but for addresses that memory has left."""
        moves = sorted(plan.moves, key=lambda move: not move.to)  # what is released comes last
        for move in moves[:steps]:
            if move.to:
                self.both(lambda heap: heap.set_moved(move, plan.segment))  # noqa: B023 -- called at once
                self.left.append(move)
            else:
                self.unmapped(move.segment, move.address, move.nbytes)
        for address, nbytes in plan.fresh[: max(0, steps - len(moves))]:
            self.mapped(plan.segment, address, nbytes)
        for move in moves:
            if move not in self.left:
                self.let_go(move.segment, move.address, move.nbytes)
        if plan.nbytes:
            self.let_go(plan.segment, plan.address, plan.nbytes)

    def go_around(self, around: bool) -> None:
        self.around = around
        self.both(lambda heap: heap.go_around(around))

    def mapped(self, segment: int, address: int, nbytes: int) -> None:
        self.both(lambda heap: heap.set_mapped(segment, address, nbytes))
        self.handed_out += nbytes

    def unmapped(self, segment: int, address: int, nbytes: int) -> None:
        self.both(lambda heap: heap.set_bare(segment, address, nbytes))
        self.handed_out -= nbytes

    def let_go(self, segment: int, address: int, nbytes: int) -> None:
        self.both(lambda heap: heap.let_go(segment, address, nbytes))

    def handles(self) -> list[Piece]:
        return self.fast.handles()


def paged_step(pair: PagedPair, draw: random.Random) -> None:
    """Do one random thing to both heaps: what any history does, or something about their memory."""
    choice = draw.random()
    if choice < 0.4:
        random_step(pair, draw)
    elif choice < 0.6:
        _demand(pair, draw)
    elif choice < 0.72:
        _free(pair, draw)
    elif choice < 0.82:
        _plan(pair, draw)
    elif choice < 0.84:
        _late_space(pair, draw)
    elif choice < 0.85:
        pair.go_around(draw.random() < 0.7)
    elif choice < 0.92:
        _idle(pair, draw)
    elif pair.left and draw.random() < 0.5:
        move = pair.left.pop(draw.randrange(len(pair.left)))
        pair.let_go(move.segment, move.address, move.nbytes)
    elif pair.plans:
        pair.carry_out(pair.plans.pop(draw.randrange(len(pair.plans))), draw.choice((LOTS, LOTS, draw.randrange(6))))
    else:
        pair.finish(draw.randrange(pair.streams))


def _size(draw: random.Random) -> int:
    return draw.choice((3000, 9000, 20_000, 65_536, 70_000, 300_000, draw.randrange(1, 1 << draw.randrange(10, 22))))


def _demand(pair: PagedPair, draw: random.Random) -> None:
    """Take, and where there is no memory, get some first."""
    nbytes, stream, live = _size(draw), draw.randrange(pair.streams), len(pair.live)
    pair.take(nbytes, stream, (0, -1))
    if len(pair.live) > live or pair.fast.last_reason() == 2:
        return
    whose = foreign, late = draw.random() < 0.6, draw.random() < 0.7
    early = not (foreign and late) and draw.random() < 0.7  # else what is not to be had at once may be chosen
    plan = pair.plan(nbytes, stream, -1, draw.choice((0, 0, LOTS)), draw.choice((0, LOTS)), whose, early=early)
    if plan is None:
        return
    pair.carry_out(plan)
    if foreign:
        pair.take_foreign(nbytes, stream, (0, -1), late=late, keep=True)
    else:
        pair.take(nbytes, stream, (0, -1), again=True)
    assert len(pair.live) > live
    if not (early or pair.around or pair.left):
        assert pair.fast.info(pair.live[-1][0]).address == plan.address


def _late_space(pair: PagedPair, draw: random.Random) -> None:
    """Add the other space, while blocks of its sizes may be cached, or try to remove one."""
    segment = draw.randrange(-1, 4)
    if segment < 0:
        pair.add_space(2 * FIRST, SPACE, 1)
    else:
        pair.both(lambda heap: heap.remove_space(segment))


def _free(pair: PagedPair, draw: random.Random) -> None:
    for _ in range(min(len(pair.live), draw.randrange(4))):
        pair.free(draw.randrange(len(pair.live)), [])


def _plan(pair: PagedPair, draw: random.Random) -> None:
    room, most = (draw.choice((0, PAGE, 4 * PAGE, LOTS)) for _ in range(2))
    whose = draw.random() < 0.7, draw.random() < 0.7
    parts, early = draw.choice((1, 4, 16)), draw.random() < 0.7
    arena = draw.choice((-1, -1, 0, 1))
    plan = pair.plan(_size(draw), draw.randrange(pair.streams), arena, room, most, whose, parts, early=early)
    _start(pair, plan, draw)


def _idle(pair: PagedPair, draw: random.Random) -> None:
    """Give idle memory back, or split it."""
    if draw.random() < 0.7:
        _start(pair, pair.reclaim(draw.choice((0, 1, PAGE, 32 * PAGE, LOTS))), draw)
    else:
        _start(pair, pair.split(draw.choice((0, PAGE, 3 * PAGE, 8 * PAGE)), draw.choice((1, 2, 4, 64))), draw)


def _start(pair: PagedPair, plan: Plan | None, draw: random.Random) -> None:
    if plan is None:
        return
    if draw.random() < 0.25:
        pair.plans.append(plan)
    else:
        pair.carry_out(plan, draw.choice((LOTS, LOTS, LOTS, 0, draw.randrange(8))))
