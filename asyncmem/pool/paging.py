"""Memory by pages: ranges of addresses that stay, below which memory comes, moves and goes.

Each of the heap's two arenas has a range of its own, reserved when the pool opens. Where a request misses, the heap
says which addresses it would get, and which idle memory to put there; new memory is taken below the most that there
ever was, where too little is idle, or where moves have taken too much of the time.

Addresses are chosen as if memory were behind all of them, so a pool never needs more for having taken pages back. That
holds as long as nothing else depends on which pages are mapped: where only pages are lacking, no cache is emptied, no
neighbours are joined and no fence is looked at. `Upkeep.beat` does that by the clock.
"""

from __future__ import annotations

import math
import time
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Final

from asyncmem.core.logged import Kind
from asyncmem.core.report import Plan
from asyncmem.devices.base import Remapped
from asyncmem.engine.grow import Room
from asyncmem.errors import DeviceError, OutOfMemoryError
from asyncmem.facts import OutOfMemoryFacts
from asyncmem.pool.pages import Change, Pages
from asyncmem.pool.supply import Supply

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from asyncmem.core import Core, Turn
    from asyncmem.devices import Device, Stream
    from asyncmem.engine.retire import Entry, Retire
    from asyncmem.options import PoolOptions
    from asyncmem.pool.waiting import Waiting

    Errand = Callable[[], None]
    Found = Change | Sequence[Entry]

_SPREAD: Final = 4  # a range's size by the device's: addresses are spread more than memory
_DEAR: Final = 0.05  # the share of a pool's life that moves may take, of which the driver has three fifths
_GRACE: Final = 0.02  # seconds that they may take in any case; beyond both new memory comes first
_PARTS: Final = 12  # a handle is no larger than such a part of a request; they cost by number
_FINE_PARTS: Final = 16  # in a pool that was given a limit, as smaller ones fit more places,
_LIMIT_PARTS: Final = 512  # nor larger than such a part of that: what lies below the end of a block cannot be moved
_STOCK: Final = 256  # one part in so many of what is reserved is mapped ahead of need, where all the rest is live
_STOCK_PARTS: Final = 4  # in handles of a quarter: it comes with what somebody waits for
_APART: Final = 8  # pages that streams may have free beside each other in the smallest pool, as a segment holds them
_FAR_OFF: Final = 8  # as long as one part in so many of it may still be added
_REST: Final = 0.25  # seconds after which what is above a lowered limit is offered to a device again that has failed


class PagedSupply(Supply):
    """The supply of a pool whose memory comes by pages. Attributes change under the pool's turn only."""

    by_pages = True

    def __init__(self, core: Core, device: Device, retire: Retire, turn: Turn, options: PoolOptions) -> None:
        super().__init__(core, device, retire, turn, options)
        self._heed(options)
        self._rest_until = -math.inf
        core.overlap_least = _APART * device.page
        self._pages = Pages(
            core, device, turn, _SPREAD * max(device.capacity, device.page) // device.page * device.page
        )

    def reconfigure(self, options: PoolOptions, limit: int) -> None:
        """Go on with other options (with the turn held)."""
        super().reconfigure(options, limit)
        self._heed(options)

    def _heed(self, options: PoolOptions) -> None:
        self._late = options.late_fences
        self._limited = options.limit is not None

    def end(self) -> None:
        """Give the ranges back, where nothing is mapped or on its way any more."""
        if not (self._core.reserved() or self.coming or self.leaving):
            self._pages.close()

    def room(self) -> Room:
        """Answer what stands against growth now; what goes back is reserved until it has gone."""
        return Room(self.limit, self._core.reserved(), self.coming)

    def kinds(self) -> dict[int, str]:
        """Answer the kind of each of the heap's segments."""
        return dict.fromkeys(self._pages.spaces, "paged")

    def mapped(self) -> int:
        """Add up the memory that the device has given."""
        return sum(handle.nbytes for handle in self._core.handles())

    # -- what is free: addresses, whether or not memory is behind them ----------------------------------------------

    def may_hold(self, need: int) -> bool:  # noqa: ARG002  # memory comes for whatever has addresses
        """Say that a request may find what it wants: only its addresses tell."""
        return True

    def should_flush(self, waiting: Waiting) -> bool:
        """Say whether to empty caches before growing: addresses are lacking, and not just memory there."""
        return not self._has_addresses(waiting)

    def should_tidy(self, waiting: Waiting, *, first: bool = False) -> bool:
        """Say whether to make the most of what is free before new addresses are used."""
        return (first or self._slack() < 0) and not self._has_addresses(waiting)

    def can_order(self, sizes: Sequence[int]) -> bool:
        """Say whether memory for these might be had."""
        return self._left() + self._core.reserved() - self._core.live() >= sum(sizes)

    def _free(self) -> int:
        return self._core.spread() - self._core.live()

    def _has_addresses(self, waiting: Waiting) -> bool:
        whose = {"foreign": self._may_be_foreign(waiting), "late": self._late}
        return all(self._core.has_addresses(nbytes, waiting.stream, **whose) for nbytes in waiting.pieces if nbytes)

    def _may_be_foreign(self, waiting: Waiting) -> bool:
        return self._has_several_streams() and waiting.capture is None and not self.keeps_apart(waiting)

    # -- deciding --------------------------------------------------------------------------------------------------

    def growth_for(self, waiting: Waiting) -> Errand | None:
        """Decide where a request's memory comes from; None where only waiting for fences, or for others, can help."""
        if not self._has_several_streams():
            self._see_what_may_move()
        found = self._plan_for(waiting)
        if not isinstance(found, Change):
            self.fence_frees()  # there is a limit in the way, so that what is done counts
            found = self._plan_for(waiting)
        elif found.fresh:
            found = self._stocked(found, waiting)
        return self._errand_of(found)

    def _stocked(self, change: Change, waiting: Waiting) -> Change:
        # Where next to all is live, new memory is asked for again soon. Where some is free, it is what serves then.
        page = self._device.page
        reserved = self._core.reserved() + self.coming + change.fresh
        spare = reserved - self._core.live() - waiting.total
        missing = min(reserved // _STOCK, self.growth.segment_size) // page * page - spare
        if missing <= 0 or self._left() - change.fresh < reserved // _FAR_OFF:
            return change
        nbytes = -(-missing // page) * page
        stock = self._core.plan(nbytes, waiting.stream, 1, nbytes, 0, False, self._late, _STOCK_PARTS)
        return replace(change, stock=stock) if isinstance(stock, Plan) else change

    def wait_for(self, waiting: Waiting) -> Errand | None:
        """Answer the wait for those uses of idle memory after which there is enough; None where there are none."""
        uses = self._uses_for(waiting, modest=False) if waiting.may_block_for != 0 else ()
        return partial(self.see_done, uses, waiting.may_block_for) if uses else None

    def patience_for(self, waiting: Waiting) -> Errand | None:
        """Answer the wait that comes before new memory is asked for; None for nothing, or no time."""
        most = self._may_wait(waiting)
        if not most:
            return None
        self.fence_frees()
        uses = self._uses_for(waiting, modest=True)
        return partial(self._wait_patiently, uses, most) if uses else None

    def part_for(self, waiting: Waiting) -> Errand | None:  # noqa: ARG002  # each part is planned for
        """Answer None: what is planned is never more than what is lacking."""
        return None

    def growth_ahead(self) -> Errand | None:
        """Decide on memory that nobody waits for: what `pregrow` or `need` names; the rest comes with who waits."""
        missing = self.ready - self._core.reserved() - self.coming
        if missing <= 0:
            return None
        return self._errand_of(self._plan_pieces((missing,), 0, foreign=False, room=self._left(), most=0))

    def _errand_of(self, found: Found) -> Errand | None:
        if not isinstance(found, Change) or not found.plans:
            return None
        self.coming += found.fresh
        return partial(self._carry_out, found)

    def _uses_for(self, waiting: Waiting, *, modest: bool) -> Sequence[Entry]:
        found = self._plan_for(waiting, modest=modest)
        if isinstance(found, Change):
            self._pages.let_go(found)
            return ()
        return found

    def _plan_for(self, waiting: Waiting, *, modest: bool = False) -> Found:
        # Moves save memory and cost time. A program that makes them go round and round is better off with more memory.
        cheap = self.lifetime.may_move(_DEAR, _GRACE)
        left = self._left()
        room = min(left, max(0, self._peak - self._core.reserved() - self.coming))
        if not (cheap and self.takes_back):
            room = left
        most = 0 if modest else left - room
        foreign = self._may_be_foreign(waiting)
        found = self._plan_pieces(waiting.pieces, waiting.stream, foreign=foreign, room=room, most=most)
        if foreign and isinstance(found, Change) and not found.plans:
            # All that is lacking is a way to the memory: it is another stream's, and cannot be waited for.
            found = self._plan_pieces(waiting.pieces, waiting.stream, foreign=False, room=room, most=most)
        return found

    def _left(self) -> int:
        left = self.room().left() or 0
        return left if self.refused is None else min(left, max(0, self.refused - self._device.page))

    def _plan_pieces(self, sizes: Sequence[int], stream: int, *, foreign: bool, room: int, most: int) -> Found:
        # Addresses do not depend on where memory is, so pieces are taken one after the other as they will be taken in
        # the end, and planned for where memory is lacking. What was taken goes back as it was.
        plans: list[Plan] = []
        taken: list[tuple[int, Sequence[Entry]]] = []
        waits: Sequence[Entry] | None = None
        for nbytes in sorted(filter(None, sizes), reverse=True):
            block = self._take(nbytes, stream, foreign=foreign) if len(sizes) > 1 else None
            if block is not None:
                taken.append(block)
                continue
            plan = self._core.plan(nbytes, stream, -1, room, most, foreign, self._late, self._parts_of(nbytes))
            if not isinstance(plan, Plan):
                waits = plan
                break
            if plan.moves or plan.fresh:
                plans.append(plan)
            elif plan.nbytes:
                self._core.let_go(plan.segment, plan.address, plan.nbytes)
            if plan.nbytes > nbytes:
                break  # the rest of its last page is for the next piece, which is planned once that is there
            fresh = sum(size for _, size in plan.fresh)
            room += sum(move.nbytes for move in plan.moves if not move.to)
            room, most = max(0, room - fresh), most - max(0, fresh - room)
        for one, entries in reversed(taken):
            self._core.put_back(one, entries)
        change = Change(plans, self.lifetime.clock())
        if waits is None:
            return change
        self._pages.let_go(change)
        return waits

    def _parts_of(self, nbytes: int) -> int:
        return max(_FINE_PARTS, nbytes * _LIMIT_PARTS // max(self.limit, 1)) if self._limited else _PARTS

    def _take(self, nbytes: int, stream: int, *, foreign: bool) -> tuple[int, Sequence[Entry]] | None:
        block = self._core.take(nbytes, stream, again=True)
        if block:
            return block, ()
        return self._core.take_foreign(nbytes, stream, late=self._late) if foreign else None

    # -- carrying out ----------------------------------------------------------------------------------------------

    def _carry_out(self, change: Change) -> None:
        """Do what was decided (blocks), and let the heap have it.

        Raises:
            OutOfMemoryError: The device has too little for what was to be new.
            DeviceError: The device failed.
        """
        done, whole = Remapped(0, 0), True
        started = time.perf_counter()
        before = self._core.reserved()
        try:
            self._wash()
            change = self._within_means(change)
            self._need_spare(change.more)
            stream = self._quiet_stream() if self.zero else None
            done = self._pages.carry_out(change)
            if stream is not None:
                whole = False
                self._pages.clear(change, done.mapped, stream)
                whole = True
        finally:
            with self._turn:
                self.coming -= change.fresh
                if isinstance(done.error, OutOfMemoryError):
                    self.refused = change.fresh
                self.grows += done.mapped > 0
                self._tell_change(before, started)
                self._peak = max(self._peak, self._core.reserved())
                if change.out():
                    self.lifetime.note_move(change.decided)
                if whole:
                    self._pages.let_go(change)
        # What was only not given back is the device's to try again.
        if done.error is not None and done.mapped < len(change.into()):
            raise done.error

    def _tell_change(self, before: int, started: float) -> None:
        change = self._core.reserved() - before
        if change:
            self.tell(Kind.GREW if change > 0 else Kind.TRIMMED, abs(change), started)

    def _quiet_stream(self) -> Stream:
        stream = self._retire.streams[self.quiet()]
        assert stream is not None
        return stream

    def _wash(self) -> None:
        if self._pages.held_back:
            self._pages.wash(self._quiet_stream())

    def _within_means(self, change: Change) -> Change:
        """Leave out what is ahead of need where the device has too little for it."""
        if change.more == 0:
            return change
        self.memory = memory = self._device.memory()
        if change.stock is None or memory.free - self.min_free >= change.more:
            return change
        with self._turn:
            self.coming -= change.ahead
            self._pages.let_go(Change((), 0.0, change.stock))
        return replace(change, stock=None)

    def _need_spare(self, more: int) -> None:
        # What others have taken meanwhile counts as much as the limit: some of the device stays free for them.
        if more == 0 or self.memory.free - self.min_free >= more:
            return
        with self._turn:
            self.refused = more
        facts = OutOfMemoryFacts(asked=more, device=self._device.name, device_free=self.memory.free)
        raise OutOfMemoryError(facts)

    def fence_frees(self) -> None:
        """Record fences behind what was freed on pages since the last; where that fails, a later beat does it."""
        for index in self._core.unfenced():
            with suppress(DeviceError):
                self._retire.fence(index)
        with suppress(DeviceError):
            self._retire.poll()

    def _see_what_may_move(self) -> None:
        """Look at fences as memory is lacking. On one stream blocks are placed alike whatever is known to be done."""
        if self.takes_back and self._core.reserved() - self._core.live() >= self._device.page:
            self.fence_frees()

    # -- giving back -----------------------------------------------------------------------------------------------

    def detach(self, wanted: int | None = None, keep: int = 0) -> Callable[[], int] | None:
        """Answer the errand that gives idle memory back, what has been idle the longest first; None where none is idle.

        Args:
            wanted: As many bytes, or a little more; None for all.
            keep: Leave at least so many bytes reserved.
        """
        if wanted is not None and self.lifetime.clock() < self._rest_until:
            return None  # it would fail again, and nobody asks for it by name
        idle = self._core.idle_memory()[0] + self._pages.held_back
        spare = self._core.reserved() - keep - self.leaving
        nbytes = min(idle, spare) if wanted is None else min(idle, spare, wanted)
        if nbytes <= 0:
            return None
        self.leaving += nbytes
        return partial(self._reclaim, nbytes)

    def detach_for(self, need: int) -> Callable[[], int] | None:
        """Answer the errand that gives idle memory back, where all of it together would do for a request.

        Memory moves in whole pieces, and one that lies across the border of what a request gets stays where it is.
        """
        idle = self._core.idle_memory()[0]
        return self.detach() if idle and self._left() + idle >= need else None

    def uses_for(self, need: int) -> list[Entry]:  # noqa: ARG002  # all that is idle goes
        """Answer what must be done before what `detach_for` takes out can go back to the device."""
        return list(self._core.idle_memory()[1])

    def retry(self) -> int:
        """Give back what the device did not take: nothing, because it tries that again itself."""
        return 0

    def _reclaim(self, nbytes: int) -> int:
        change, done = Change((), 0.0), Remapped(0, 0)
        started = time.perf_counter()
        before = self._core.reserved()
        try:
            self._wash()
            self._retire.settle(self._core.idle_memory()[1])
            with self._turn:
                plan = self._core.reclaim(nbytes)
            if plan is not None:
                change = Change((plan,), 0.0)
                done = self._pages.carry_out(change)
        except BaseException:
            self._rest_until = self.lifetime.clock() + _REST
            raise
        finally:
            with self._turn:
                self.leaving -= nbytes
                self._pages.let_go(change)
                self._tell_change(before, started)
                self.trims += done.unmapped > 0
                self.refused = None
        if done.error is not None:
            self._rest_until = self.lifetime.clock() + _REST
            raise done.error
        return sum(length for _, (_, length) in change.out()[: done.unmapped])
