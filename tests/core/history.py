"""Random histories that the compiled heap and its twin live through together, compared after every step."""

import random
from collections.abc import Callable, Sequence
from typing import TypeVar, Unpack, cast

from asyncmem.core import Heap, HeapOptions
from tests.reference import ReferenceHeap

T = TypeVar("T")

SEGMENT = 1 << 22
SIZES = (1, 512, 513, 4096, 4096, 4096, 10_000, 65_536, 65_536, 300_000, 1 << 20, 3 << 20)


def live_through_many(
    live_through: Callable[[int, int, type[ReferenceHeap]], object], twin: type[ReferenceHeap]
) -> None:
    """Live through 25 histories of 200 steps beside twins of one kind: enough for a broken one to be seen."""
    for seed in range(25):
        live_through(seed, 200, twin)


class Pair:
    """The two heaps, and the live blocks as (compiled number, twin's number) pairs.

    Blocks are numbered differently, so pairs are matched by address, which must always be the same.
    """

    def __init__(self, twin: type[ReferenceHeap] | None = None, **options: Unpack[HeapOptions]) -> None:
        self.fast = Heap(**options)
        self.twin = (ReferenceHeap if twin is None else twin)(**options)
        self.live: list[tuple[int, int]] = []
        self.leases: list[int] = []
        self.accounts = [0]
        self.inner: dict[int, int] = {}
        self.streams = 1
        self.next_address = SEGMENT

    def both(self, call: Callable[[Heap | ReferenceHeap], T]) -> T:
        """Make the same call on both and demand the same answer, or an error from both."""
        fast, twin = _attempt(call, self.fast), _attempt(call, self.twin)
        assert fast == twin
        return cast("T", fast)

    def compare(self) -> None:
        """Demand that both are sound and the same in everything that can be seen."""
        self.fast.check()
        self.twin.check()
        assert self.fast.blocks() == self.twin.blocks()
        assert [self.fast.account(one) for one in self.accounts] == [self.twin.account(one) for one in self.accounts]
        for ask in ("counts", "segments"):
            assert getattr(self.fast, ask)() == getattr(self.twin, ask)(), ask
        for ask in ("last_level", "last_reason", "last_flags", "touched", "pending", "largest", "live"):
            assert getattr(self.fast, ask)() == getattr(self.twin, ask)(), ask

    def took(self, fast: int, twin: int) -> None:
        """Note a block that both took, or that both missed."""
        assert bool(fast) == bool(twin)
        if fast:
            assert self.fast.info(fast) == self.twin.info(twin)
            self.live.append((fast, twin))

    # -- steps -----------------------------------------------------------------------------------------------------

    def add_segment(self, nbytes: int, arena: int, stream: int) -> None:
        address = self.next_address
        self.next_address += nbytes + SEGMENT
        self.both(lambda heap: heap.add_segment(address, nbytes, arena, stream))

    def remove_empty(self) -> None:
        if empty := self.fast.empty_segments():
            self.both(lambda heap: heap.remove_segment(empty[0][0]))

    def add_stream(self) -> None:
        self.streams += 1
        self.both(lambda heap: heap.add_stream())

    def finish(self, stream: int) -> None:
        epoch = self.both(lambda heap: heap.close_epoch(stream))
        self.both(lambda heap: heap.mark_done(stream, epoch))

    def take(
        self, nbytes: int, stream: int, place: tuple[int, int], *, anywhere: bool = False, again: bool = False
    ) -> None:
        account, arena = place
        self.took(*(heap.take(nbytes, stream, account, arena, anywhere, again) for heap in (self.fast, self.twin)))

    def take_foreign(self, nbytes: int, stream: int, place: tuple[int, int], *, late: bool, keep: bool) -> None:
        account, arena = place
        fast = self.fast.take_foreign(nbytes, stream, account, arena, late=late)
        twin = self.twin.take_foreign(nbytes, stream, account, arena, late=late)
        assert (fast is None) == (twin is None)
        if fast is None or twin is None:
            return
        assert fast[1] == twin[1]
        if keep:
            self.took(fast[0], twin[0])
        else:
            assert self.fast.put_back(*fast) == self.twin.put_back(*twin)

    def take_at(self, nbytes: int, stream: int, which: int, granule: int, *, late: bool) -> None:
        arena = self.leases[which]
        account = self.inner[arena]
        address = min(block.address for block in self.fast.blocks() if block.arena == arena) + granule * 512
        fast, twin = (
            _attempt(lambda heap: heap.take_at(address, nbytes, stream, account, arena, late), heap)
            for heap in (self.fast, self.twin)
        )
        if isinstance(fast, tuple) and isinstance(twin, tuple):
            assert fast[1] == twin[1]
            assert self.fast.info(fast[0]).address == address
            self.took(fast[0], twin[0])
        else:
            assert fast == twin

    def take_many(self, sizes: Sequence[int], stream: int, place: tuple[int, int]) -> None:
        account, arena = place
        fast = self.fast.take_many(sizes, stream, account, arena)
        twin = self.twin.take_many(sizes, stream, account, arena)
        assert len(fast) == len(twin)
        for pair in zip(fast, twin, strict=True):
            self.took(*pair)

    def free(self, which: int, entries: Sequence[tuple[int, int]] = ()) -> None:
        fast, twin = self.live.pop(which % len(self.live))
        assert self.fast.free(fast, entries) == self.twin.free(twin, entries)

    def free_many(self, pairs: Sequence[tuple[int, int]]) -> None:
        self.live = [pair for pair in self.live if pair not in pairs]
        assert self.fast.free_many([fast for fast, _ in pairs]) == self.twin.free_many([twin for _, twin in pairs])

    def hand_over(self, which: int, stream: int) -> None:
        fast, twin = self.live[which % len(self.live)]
        self.fast.set_home(fast, stream)
        self.twin.set_home(twin, stream)

    def open_lease(self, which: int) -> None:
        fast, twin = self.live.pop(which % len(self.live))
        arena = self.fast.open_lease(fast)
        assert arena == self.twin.open_lease(twin)
        self.leases.append(arena)
        account = self.both(lambda heap: heap.add_account(-1))
        self.inner[arena] = account

    def close_lease(self, which: int) -> None:
        arena = self.leases.pop(which % len(self.leases))
        self.both(lambda heap: heap.close_lease(arena))
        account = self.inner.pop(arena)
        self.both(lambda heap: heap.remove_account(account))

    def add_account(self, limit: int | None) -> None:
        parent = self.accounts[-1]
        self.accounts.append(self.both(lambda heap: heap.add_account(parent, limit)))

    def remove_account(self) -> None:
        if len(self.accounts) > 1 and self.both(lambda heap: heap.remove_account(self.accounts[-1])) is None:
            self.accounts.pop()

    def places(self) -> list[tuple[int, int]]:
        """Where a take may go: (account, arena)."""
        return [(account, arena) for account in self.accounts for arena in (-1, 0, 1)] + [
            (account, arena) for arena, account in self.inner.items()
        ]


def _attempt(call: Callable[[Heap | ReferenceHeap], T], heap: Heap | ReferenceHeap) -> T | str:
    try:
        return call(heap)
    except ValueError as error:
        return type(error).__name__


def random_step(pair: Pair, draw: random.Random) -> None:
    """Do one random thing to both heaps."""
    steps = draw.choice(_STEPS)
    steps(pair, draw)


def _stream(pair: Pair, draw: random.Random) -> int:
    return draw.randrange(pair.streams)


def _size(draw: random.Random) -> int:
    return draw.choice(SIZES) if draw.random() < 0.8 else draw.randrange(1, SEGMENT)


def _take(pair: Pair, draw: random.Random) -> None:
    pair.take(_size(draw), _stream(pair, draw), draw.choice(pair.places()), anywhere=draw.random() < 0.2)


def _take_foreign(pair: Pair, draw: random.Random) -> None:
    late, keep = draw.random() < 0.5, draw.random() < 0.7
    pair.take_foreign(_size(draw), _stream(pair, draw), draw.choice(pair.places()), late=late, keep=keep)


def _take_many(pair: Pair, draw: random.Random) -> None:
    sizes = [_size(draw) for _ in range(draw.randrange(6))]
    pair.take_many(sizes, _stream(pair, draw), draw.choice(pair.places()))


def _entries(pair: Pair, draw: random.Random) -> list[tuple[int, int]]:
    streams = [_stream(pair, draw) for _ in range(draw.choice((0, 0, 1, 2)))]
    return [(stream, draw.randint(1, pair.fast.open_epoch(stream))) for stream in streams]


def _free(pair: Pair, draw: random.Random) -> None:
    if pair.live:
        pair.free(draw.randrange(len(pair.live)), _entries(pair, draw))


def _free_many(pair: Pair, draw: random.Random) -> None:
    pair.free_many(draw.sample(pair.live, min(len(pair.live), draw.randrange(8))))


def _hand_over(pair: Pair, draw: random.Random) -> None:
    if pair.live:
        pair.hand_over(draw.randrange(len(pair.live)), _stream(pair, draw))


def _close_epoch(pair: Pair, draw: random.Random) -> None:
    stream = _stream(pair, draw)
    pair.both(lambda heap: heap.close_epoch(stream))


def _finish(pair: Pair, draw: random.Random) -> None:
    stream = _stream(pair, draw)
    epoch = draw.randint(0, pair.fast.open_epoch(stream))
    name = draw.choice(("publish", "mark_done"))
    pair.both(lambda heap: getattr(heap, name)(stream, epoch))
    pair.both(lambda heap: heap.entry_state(stream, epoch))


def _segment(pair: Pair, draw: random.Random) -> None:
    if len(pair.fast.segments()) < 6:
        pair.add_segment(draw.choice((1 << 21, SEGMENT, 2 * SEGMENT)), draw.randrange(2), _stream(pair, draw))


def _remove(pair: Pair, _draw: random.Random) -> None:
    pair.remove_empty()


def _stream_added(pair: Pair, _draw: random.Random) -> None:
    if pair.streams < 4:
        pair.add_stream()


def _flush(pair: Pair, draw: random.Random) -> None:
    stream = draw.randrange(-1, pair.streams)
    pair.both(lambda heap: heap.flush(stream))


def _merge(pair: Pair, draw: random.Random) -> None:
    arena = draw.choice([-1, *pair.leases])
    pair.both(lambda heap: heap.merge(arena))


def _lease(pair: Pair, draw: random.Random) -> None:
    if pair.live and len(pair.leases) < 3:
        pair.open_lease(draw.randrange(len(pair.live)))
    elif pair.leases:
        pair.close_lease(draw.randrange(len(pair.leases)))


def _account(pair: Pair, draw: random.Random) -> None:
    if len(pair.accounts) < 4:
        pair.add_account(draw.choice((None, 1 << 20, SEGMENT)))
    else:
        pair.remove_account()


def _tune(pair: Pair, draw: random.Random) -> None:
    options = draw.choice(_TUNINGS)
    pair.both(lambda heap: heap.configure(**options))


_TUNINGS: tuple[HeapOptions, ...] = (
    {"strategy": "good_fit"},
    {"strategy": "best_fit"},
    {"small_limit": 1 << 18},
    {"small_limit": 1 << 20},
    {"stream_cache_blocks": 2},
    {"stream_cache_bytes": 1 << 20},
    {"stream_cache_blocks": 256},
    {"shared_cache_blocks": 3},
    {"shared_cache_bytes": 1 << 16},
    {"shared_cache_bytes": 1 << 28},
)


def _watch(pair: Pair, draw: random.Random) -> None:
    low, high = (draw.randrange(2 * SEGMENT) for _ in range(2))
    pair.both(lambda heap: heap.set_marks(low, high))
    account, closed = draw.choice(pair.accounts), draw.random() < 0.5
    pair.both(lambda heap: heap.set_gate(account, closed))
    if draw.random() < 0.5:
        pair.both(lambda heap: heap.leave_ajar(SEGMENT, high))


def _limit(pair: Pair, draw: random.Random) -> None:
    account, limit = draw.choice(pair.accounts[1:] or [0]), draw.choice((None, 0, 1 << 19, SEGMENT))
    if account:
        pair.both(lambda heap: heap.set_limit(account, limit))
    if draw.random() < 0.1:
        pair.both(lambda heap: heap.reset_peaks())


_STEPS: tuple[Callable[[Pair, random.Random], None], ...] = (
    *[_take] * 12, *[_free] * 10, _take_foreign, _take_foreign, _take_many, _free_many, _hand_over, _close_epoch,
    _close_epoch, _finish, _finish, _segment, _segment, _remove, _stream_added, _flush, _merge, _lease, _account, _tune,
    _watch, _limit,
)  # fmt: skip
